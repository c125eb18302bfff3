"""Read a training configuration (configs/*.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .batches import DataConfig
from .families import FAMILIES
from .stages import RunConfig, Stage
from .tasks import Mixture

ROLES = ("draft", "target")


@dataclass(frozen=True)
class TokenizerConfig:
    """Options of the shared tokenizer's training."""

    vocab_size: int
    seed: int
    samples: int


@dataclass(frozen=True)
class PairConfig:
    """One family: its tokenizer and the runs of its draft and target."""

    tokenizer: TokenizerConfig
    runs: dict[str, RunConfig]


def load(path: Path) -> PairConfig:
    """Read and check a configuration file; unknown keys are errors.

    `base` names the configuration beside it that this one goes on from: what it does not say is said there.
    """
    content = _content(path)
    tokenizer = TokenizerConfig(**content.pop("tokenizer"))
    data = _data(content.pop("data"))
    family = FAMILIES[content.pop("family")]
    runs = {role: _run(content.pop(role), family, data, tokenizer.vocab_size) for role in ROLES}
    if content:
        raise ValueError(f"unknown sections in {path.name}: {sorted(content)}")
    return PairConfig(tokenizer, runs)


def _content(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = tomllib.load(file)
    base = content.pop("base", None)
    return content if base is None else _merged(_content(path.with_name(f"{base}.toml")), content)


def _merged(base: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `content`, table by table."""
    merged = base | content
    for key in base.keys() & content.keys():
        if isinstance(base[key], dict):
            merged[key] = _merged(base[key], content[key])
    return merged


def _data(section: dict[str, Any]) -> DataConfig:
    mixture = Mixture(turns=tuple(section.pop("turns")), **section.pop("mixture", {}), shares=section.pop("shares"))
    return DataConfig(mixture, **section)


def _run(section: dict[str, Any], family: ModuleType, data: DataConfig, vocab_size: int) -> RunConfig:
    sizes = family.Sizes(vocab_size=vocab_size, **section.pop("model"))
    start = {key: tuple(value) if isinstance(value, list) else value for key, value in section.pop("start", {}).items()}
    stages = tuple(Stage(*stage) for stage in section.pop("stages"))
    return RunConfig(family, sizes, family.Start(**start), data, stages, **section)
