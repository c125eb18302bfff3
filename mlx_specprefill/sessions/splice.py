"""A positioned cache cut open, so that entries can be put between those that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.positioned import PositionedKVCache, leaves, place

__all__ = ["Splice", "can_splice"]


def can_splice(cache: Sequence[Any]) -> bool:
    """Whether every layer still holds all it was fed: a window has lost what it would need, a state can't go back."""
    parts = list(leaves(cache))
    return bool(parts) and all(isinstance(part, PositionedKVCache) for part in parts)


class Splice:
    """Sets aside what a cache holds from a position on. The cache is fed meanwhile, and gets it back in order.

    Args:
        cache: one of which `can_splice` is true.
        position: the first that is set aside.
    """

    def __init__(self, cache: Sequence[Any], position: int) -> None:
        self._cache = cache
        self._layers = list(leaves(cache))
        runs = self._layers[0].runs.expand()
        self._positions: npt.NDArray[np.int32] = runs[runs >= position]
        first, end = runs.size - self._positions.size, runs.size
        self._kept = [(part.keys[..., first:end, :], part.values[..., first:end, :]) for part in self._layers]
        self._done = 0
        for part in self._layers:
            part.trim(part.next - position)

    def put_back(self, before: int | None = None) -> None:
        """Return what lies before a position, None: all that is left."""
        count = self._positions.size if before is None else int(np.searchsorted(self._positions, before))
        if count == self._done:
            return
        at = slice(self._done, count)
        place(self._cache, self._positions[at])
        for part, (keys, values) in zip(self._layers, self._kept, strict=True):
            part.update_and_fetch(keys[..., at, :], values[..., at, :])
        self._done = count
        mx.eval([part.state for part in self._layers])
