"""The memory that a model will need, before it is loaded or even fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_specprefill import Blueprint, blueprint, describe_stored, loaded_bytes

from .hub import Repository

__all__ = ["Need", "fit", "need_of_repository", "need_of_stored", "size"]


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes.

    Attributes:
        weights: bytes once loaded; of a GGUF file on a hub, those of the file.
        design: what its configuration says; None of a GGUF file on a hub, which is not read before it is fetched.
    """

    name: str
    weights: int
    design: Blueprint | None

    def cache(self, tokens: int) -> int | None:
        """Bytes of the KV cache of a sequence, no longer than the model's context; None where they can't be known."""
        return None if self.design is None else self.design.cache_bytes(min(tokens, self.design.context))

    def memory(self, tokens: int) -> int:
        """Weights and cache; the former alone where the latter can't be known."""
        return self.weights + (self.cache(tokens) or 0)

    def said(self, tokens: int) -> str:
        cache = self.cache(tokens)
        more = "a KV cache of unknown size" if cache is None else f"{size(cache)} of KV cache"
        return f"{self.name}: {size(self.weights)} of weights and {more}"


def need_of_repository(repository: Repository, file: str | None) -> Need:
    """From config.json and the heads of its weights, which are fetched.

    Raises:
        HubError: as of `look_up`.
    """
    config = None if file is not None else repository.config()
    if config is None:
        return Need(repository.id, sum(one.size for one in repository.files), None)
    weights, dtype = loaded_bytes(repository.parameters())
    return Need(repository.id, weights, blueprint(config, dtype))


def need_of_stored(name: str, path: Path) -> Need:
    """From the files of a model that is here.

    Raises:
        LoadError: they can't be read.
    """
    config, parameters = describe_stored(path)
    weights, dtype = loaded_bytes(parameters)
    return Need(name, weights, blueprint(config, dtype))


def fit(needs: Sequence[Need], tokens: int, limit: int | None) -> bool:
    """Whether all have room together, with a sequence of that many tokens."""
    return limit is None or sum(need.memory(tokens) for need in needs) <= limit


def size(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:.1f} GB" if count >= 1 << 30 else f"{count / 2**20:.1f} MB"
