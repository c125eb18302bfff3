"""First and recent tokens only, at positions relative to the cache (StreamingLLM; TriForce, section 4.2).

Recent tokens keep the rotation that they were stored with. When old ones leave, the first tokens are turned further by
as many positions, so that they always lie directly before the others. RoPE depends on differences of positions alone,
so this is the same as numbering the cache from 0 at every step, and rotates a few keys instead of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .draft_cache import DraftKVCache

__all__ = ["StreamingKVCache"]

# Keys (1, H, L, D) turned further by a number of positions.
Turn = Callable[[mx.array, int], mx.array]


class StreamingKVCache(DraftKVCache):
    """Keys and values (1, H, S, D) of the first `sinks` tokens and of recent ones.

    Tokens leave only in `evict`, so that those of an unverified proposal can be trimmed before.

    Args:
        window: recent tokens that `evict` leaves.
        seen: rotations that the model has asked for since another layer's keys were stored. The first keys that come
            take theirs from it; without one the layer doesn't rotate.
    """

    def __init__(self, sinks: int, window: int, seen: list[Any]) -> None:
        super().__init__()
        self.sinks = sinks
        self.window = window
        self.offset = 0
        self._seen: list[Any] | None = seen
        self._turn: Turn | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._seen is not None:
            self._turn = self._seen[-1] if self._seen else None
            self._seen.clear()
            self._seen = None
        if self.keys is not None and self.values is not None:
            keys, values = (
                mx.concatenate([old, new], axis=2) for old, new in ((self.keys, keys), (self.values, values))
            )
        self.offset += keys.shape[2] - self.size()
        self.keys, self.values = keys, values
        return keys, values

    def evict(self) -> None:
        """Forget what is neither first nor recent."""
        excess = self.size() - self.sinks - self.window
        if excess <= 0 or self.keys is None or self.values is None:
            return
        first, later = self.keys[..., : self.sinks, :], self.keys[..., self.sinks + excess :, :]
        if self._turn is not None and self.sinks:
            first = self._turn(first, excess)
        self.keys = mx.concatenate([first, later], axis=2)
        self.values = mx.concatenate(
            [self.values[..., : self.sinks, :], self.values[..., self.sinks + excess :, :]], axis=2
        )

    def trim(self, n: int) -> int:
        if self.keys is not None and self.values is not None and n > 0:
            self.keys, self.values = self.keys[..., :-n, :], self.values[..., :-n, :]
            self.offset -= n
        return n
