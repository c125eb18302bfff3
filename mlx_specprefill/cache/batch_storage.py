"""What a batch of caches is made of: where a row's tokens lie, and the array that holds the tokens of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache

from .positioned import Positioned, Positions, Runs

__all__ = ["BatchRow", "last_tokens", "stacked"]


class BatchRow:
    """Where one row's tokens lie: those it joined with, and one more per step since."""

    def __init__(self, runs: Runs, slots: int, start: int, joined_at: int) -> None:
        self.runs = runs  # positions of the tokens it joined with, as far as they were stored
        self.slots = slots  # tokens it had been fed by then
        self.start = start  # position of the first token after them
        self.joined_at = joined_at  # step of the batch

    @cached_property
    def _positions(self) -> Positions:
        return self.runs.expand()

    def count_from(self, position: int) -> int:
        """How many of the tokens that it joined with lie at or after `position`."""
        return self.runs.size - int(self._positions.searchsorted(np.int32(position)))


def last_tokens(cache: Positioned, count: int) -> tuple[mx.array | None, mx.array | None]:
    """Keys and values of the last `count` tokens of a single row, in order."""
    inner = cache.inner
    if inner.keys is None or count == 0:
        return None, None
    if isinstance(inner, RotatingKVCache):
        keys, values = inner._temporal_order(inner.keys), inner._temporal_order(inner.values)
    else:
        keys, values = inner.keys_and_values()
    return keys[..., -count:, :], values[..., -count:, :]


def stacked(parts: Sequence[mx.array | None], rows: Sequence[int], spare: int, size: int, room: int) -> mx.array | None:
    """Parts (B_i, H, S_i, D) as one array (sum of B_i + spare, H, size + room, D) in which they all end at `size`."""
    example = next((part for part in parts if part is not None), None)
    if example is None:
        return None
    _, H, _, D = example.shape
    array = mx.zeros((sum(rows) + spare, H, size + room, D), example.dtype)
    at = 0
    for part, count in zip(parts, rows, strict=True):
        if part is not None:
            array[at : at + count, :, size - part.shape[2] : size] = part
        at += count
    return array
