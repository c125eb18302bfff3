"""Takes the rejected tokens of a draft back out of a cache. A whole earlier state: `Snapshot` in `cache/positioned`.

Keys and values are trimmed. A window that has wrapped has overwritten the tokens that a trim needs. A forward of
several rows leaves a ring that still holds the tokens before it, so cutting its last rows off is exact. Over several
forwards, a copy is kept. Recurrent states are restored and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from ..adapters.recurrence import RecurrentCall, record_recurrence, replay_refusal
from ..adapters.rotation import adjust_offsets
from ..cache.positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, leaves
from ..errors import SparseUnsupportedError

_RINGS = (RotatingKVCache, PositionedRotatingKVCache)


def rollback_refusal(model: nn.Module) -> str | None:
    """Return why tokens can't be taken back from this model's caches; None if they can."""
    cache = make_prompt_cache(model)
    for part in leaves(cache):
        if getattr(part, "keep", 0):
            return "its window keeps first tokens"
        if not isinstance(part, (PositionedKVCache, KVCache, QuantizedKVCache, ArraysCache, *_RINGS)):
            return f"tokens can't be taken back from its cache type {type(part).__name__}"
    return replay_refusal(model, cache)


class Rollback:
    """One forward of several tokens, of which a prefix is kept."""

    def __init__(self, cache: Sequence[Any], shift: int = 0) -> None:
        self._parts = list(leaves(cache))
        self._cache = cache
        self._shift = shift
        self._rows = 0
        self._states: dict[int, list[Any]] = {}
        self._calls: list[RecurrentCall] = []

    def forward(self, model: Callable[..., mx.array], tokens: mx.array) -> mx.array:
        """Feed tokens (1, R); return logits (R, V)."""
        self._rows = tokens.shape[1]
        self._states = {id(part): list(part.cache) for part in self._parts if isinstance(part, ArraysCache)}
        with record_recurrence() as self._calls, adjust_offsets([self._shift]):
            return model(tokens, cache=self._cache)[0]

    def keep(self, count: int) -> None:
        """Roll back to the first `count` tokens (at least 1).

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
    """Drop the last rows of a ring that a forward of several rows has just put in order."""
    ring = part.inner if isinstance(part, Positioned) else part
    if ring.keys is None:
        return
    kept = ring._idx - count
    ring.keys, ring.values = ring.keys[..., :kept, :], ring.values[..., :kept, :]
    ring.offset -= count
    ring._idx = kept
    if isinstance(part, Positioned):
        part.next -= count
        part.held.drop_from(part.next)
