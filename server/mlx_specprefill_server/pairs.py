"""Named model pairs, read from a `pairs.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["CLONE_PAIRS", "Pair", "PairsError", "find_pair", "read_pairs"]

# The file is data and stays in the clone: an installed wheel has no such neighbour.
CLONE_PAIRS = Path(__file__).resolve().parents[2] / "models" / "pairs.toml"


class PairsError(ValueError):
    """The pairs file is missing or malformed, or does not have the pair; the message is meant for the user."""


class Pair(BaseModel):
    """One row of the file: `target` and `draft` are folders or repository ids, `alias` is the id that clients see."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: str
    draft: str | None = None
    threshold: int | None = Field(default=None, ge=0)
    keep_pct: float | None = Field(default=None, gt=0, le=1)
    alias: str | None = None
    note: str = ""


def find_pair(name: str, file: Path | None = None) -> Pair:
    """The pair of that name.

    Raises:
        PairsError: no such file, no such pair, or a row that can't be understood.
    """
    path = file or CLONE_PAIRS
    if file is None and not path.is_file():
        raise PairsError(
            "no models/pairs.toml beside this installation: named pairs and the demo models are part of a clone of "
            "the repository. Give --target and --draft, or your own file with --pairs-file."
        )
    pairs = read_pairs(path)
    if name not in pairs:
        raise PairsError(f"no pair {name!r} in {path}; it has: {', '.join(pairs) or 'none'}")
    pair = pairs[name]
    return pair if pair.alias else pair.model_copy(update={"alias": name})


def read_pairs(path: Path) -> dict[str, Pair]:
    """Every pair of the file in its order, folders resolved against the file's own place."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PairsError(f"can't read {path}: {error}") from error
    return {name: _pair(name, row, path) for name, row in rows.items()}


def _pair(name: str, row: Any, path: Path) -> Pair:
    try:
        pair = Pair.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise PairsError(f"{path}: {where}: {first['msg']}") from error
    draft = None if pair.draft is None else _locate(pair.draft, path)
    return pair.model_copy(update={"target": _locate(pair.target, path), "draft": draft})


def _locate(model: str, path: Path) -> str:
    return str((path.parent / model).resolve()) if model.startswith("./") else model
