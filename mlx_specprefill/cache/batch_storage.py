"""Storage of a batch of caches: the slots of each row's tokens, and the arrays that hold all rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .positioned import Positioned, Positions, Runs

__all__ = ["BatchRow", "last_tokens", "stacked"]


class BatchRow:
    """Slots of one row's tokens: those it joined with, and one more per step since."""

    def __init__(self, runs: Runs, slots: int, start: int, joined_at: int) -> None:
        self.runs = runs  # positions of its stored tokens when it joined
        self.slots = slots  # number of tokens fed before it joined
        self.start = start  # position of the first token after joining
        self.joined_at = joined_at  # step of the batch

    @cached_property
    def positions(self) -> Positions:
        """Return the positions of the tokens that it joined with, in the order of feeding."""
        return self.runs.expand()

    @cached_property
    def ascends(self) -> bool:
        """Return whether these tokens were fed in order of position, without recalls."""
        return bool((np.diff(self.positions) > 0).all())

    def count_from(self, position: int) -> int:
        """Return the number of these tokens, in a row that ascends, at or after `position`."""
        return self.runs.size - int(self.positions.searchsorted(np.int32(position)))


def last_tokens(cache: Any, count: int) -> list[mx.array]:
    """Return the last `count` tokens of a single row as stored, in order: keys and values, or two triples."""
    inner = cache.inner if isinstance(cache, Positioned) else cache
    if inner.keys is None or count == 0:
        return []
    if isinstance(inner, RotatingKVCache):
        keys, values = inner._temporal_order(inner.keys), inner._temporal_order(inner.values)
    else:
        keys, values = inner.keys_and_values()
    arrays = [*keys, *values] if isinstance(inner, QuantizedKVCache) else [keys, values]
    return [array[..., -count:, :] for array in arrays]


def stacked(parts: Sequence[tuple[Sequence[mx.array], int]], spare: int, size: int, room: int) -> list[mx.array]:
    """Stack arrays (B_i, H, S_i, D) into (sum of B_i + spare, H, size + room, D), aligned so that all end at slot
    `size`.

    Args:
        parts: their arrays, none for rows without tokens, and B_i.
    """
    rows = sum(count for _, count in parts)
    examples: Sequence[mx.array] = next((arrays for arrays, _ in parts if arrays), ())
    made = [mx.zeros((rows + spare, a.shape[1], size + room, a.shape[3]), a.dtype) for a in examples]
    at = 0
    for arrays, count in parts:
        for target, part in zip(made, arrays, strict=False):
            target[at : at + count, :, size - part.shape[2] : size] = part
        at += count
    return made
