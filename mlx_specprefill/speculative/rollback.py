"""Rollback of fed tokens, for every kind of cache.

Keys and values are trimmed. A window that has wrapped has overwritten what a trim would need, so it is not trimmed: a
forward of several rows leaves a ring that still holds what was before it, and cutting its last rows off is exact; one
row at a time, copies are kept. Recurrent states are restored and replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache

from ..adapters.recurrence import RecurrentCall, recorded_recurrence, replay_refusal
from ..adapters.rope import adjusted_offsets
from ..cache.positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, leaves
from ..errors import SparseUnsupportedError

__all__ = ["CacheSnapshots", "Rollback", "rollback_refusal"]

_RINGS = (RotatingKVCache, PositionedRotatingKVCache)


def rollback_refusal(model: nn.Module, cache: Sequence[Any]) -> str | None:
    """Why tokens can't be taken back from this model's caches; None when they can."""
    for part in leaves(cache):
        if getattr(part, "keep", 0):
            return "its window keeps first tokens"
        if not isinstance(part, (PositionedKVCache, KVCache, QuantizedKVCache, ArraysCache, *_RINGS)):
            return f"tokens can't be taken back from its cache type {type(part).__name__}"
    return replay_refusal(model, cache)


class Rollback:
    """One forward of several tokens, of which only the first ones may stay."""

    def __init__(self, cache: Sequence[Any], shift: int = 0) -> None:
        self._parts = list(leaves(cache))
        self._cache = cache
        self._shift = shift
        self._rows = 0
        self._states: dict[int, list[Any]] = {}
        self._calls: list[RecurrentCall] = []

    def forward(self, model: Callable[..., mx.array], tokens: mx.array) -> mx.array:
        """Feed tokens (1, R); logits (R, V)."""
        self._rows = tokens.shape[1]
        self._states = {id(part): list(part.cache) for part in self._parts if isinstance(part, ArraysCache)}
        with recorded_recurrence() as self._calls, adjusted_offsets([self._shift]):
            return model(tokens, cache=self._cache)[0]

    def keep(self, count: int) -> None:
        """Go on as if only the first `count` tokens (at least 1) had been fed.

        Raises:
            SparseUnsupportedError: a recurrent layer was not seen during the forward.
        """
        excess = self._rows - count
        if excess <= 0:
            return
        for part in self._parts:
            if isinstance(part, ArraysCache):
                part.cache = self._states.pop(id(part))
            elif isinstance(part, _RINGS):
                _cut(part, excess)
            elif not part.empty():
                part.trim(excess)
        replayed = set()
        for call in self._calls:
            call.replay(count)
            replayed.add(id(call.cache))
        if replayed != {id(part) for part in self._parts if isinstance(part, ArraysCache)}:
            raise SparseUnsupportedError("a recurrent layer can't be replayed")


def _cut(part: Any, count: int) -> None:
    """Drop the last rows of a ring that a forward of several rows has just put into order."""
    ring = part.inner if isinstance(part, Positioned) else part
    if ring.keys is None:
        return
    kept = ring._idx - count
    ring.keys, ring.values = ring.keys[..., :kept, :], ring.values[..., :kept, :]
    ring.offset -= count
    ring._idx = kept
    if isinstance(part, Positioned):
        part.next -= count
        part.runs.drop_from(part.next)


class CacheSnapshots:
    """Cache states after single-token forwards, any number of which can be undone. `take` after each forward."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._parts = list(leaves(cache))
        self._states: list[list[Any]] = []
        self.take()

    def take(self) -> None:
        self._states.append([_snapshot(part) for part in self._parts])

    def restore(self, count: int) -> None:
        """Undo all forwards but the first `count`."""
        excess = len(self._states) - 1 - count
        if excess <= 0:
            return
        for part, state in zip(self._parts, self._states[count], strict=True):
            if isinstance(part, ArraysCache):
                part.cache = state
            elif state is not None:
                part.state = state
            elif not part.empty():
                part.trim(excess)
        del self._states[count + 1 :]


def _snapshot(part: Any) -> Any:
    if isinstance(part, ArraysCache):
        return list(part.cache)
    # Copies share memory with the ring until that is written to.
    return copy.deepcopy(part.state) if isinstance(part, _RINGS) else None
