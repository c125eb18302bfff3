"""Reads rows of tokens in one forward behind what a cache holds: each row sees that and itself, and no other row.

All rows begin at the position after the last one. They are stored behind the cache's tokens like any others, and taken
back afterwards. A mask hides the other rows. So the tokens in front are neither copied nor read for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..arrays import Indices, Positions
from ..request import TokenIds
from .positioned import PositionedKVCache


class _Layer(PositionedKVCache):
    """One layer's cache as models see it meanwhile. Its tokens are stored in the layer's own arrays."""

    def __init__(self, part: PositionedKVCache, rows: SideBySide) -> None:
        self.inner, self.held, self._rows = part.inner, part.held, rows

    @property
    def offset(self) -> mx.array:
        return self._rows.offset

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        mask = self._rows.mask(self.held.positions, window_size)
        return mask if N > 1 else mask[None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self.inner.update_and_fetch(keys, values)
        return fetched


class SideBySide:
    """Rows behind a prompt's cache. A context manager: at its end the cache is as it was.

    Args:
        cache: of a target that follows explicit positions, full attention in every layer (`can_hold`).

    Attributes:
        offset: positions of the next forward's tokens, (1, L) int32.
    """

    def __init__(self, cache: Sequence[PositionedKVCache]) -> None:
        self._parts = cache
        self._layers = [_Layer(part, self) for part in cache]
        self._next = cache[0].next
        self._numbers: Indices = np.zeros(0, dtype=np.int32)
        self._positions: Positions = np.zeros(0, dtype=np.int32)
        self._coming = 0
        self._masks: dict[int | None, mx.array] = {}
        self.offset = mx.array(self._positions)[None]

    @staticmethod
    def can_hold(cache: Sequence[Any]) -> bool:
        """Return whether rows can be read behind this cache."""
        return all(type(part) is PositionedKVCache for part in cache)

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        for part in self._parts:
            part.inner.trim(self._numbers.size)

    def read(self, model: Any, tokens: TokenIds, rows: Indices, places: Indices) -> mx.array:
        """Feed tokens in one forward. Return their logits, (L, V), not computed yet.

        Args:
            tokens: (L,); those of one row come in order, in one forward or several.
            rows, places: the row of each token, and its place in the row, (L,).
        """
        positions = (self._next + places).astype(np.int32)
        self._numbers, self._positions = np.append(self._numbers, rows), np.append(self._positions, positions)
        self._coming, self.offset, self._masks = positions.size, mx.array(positions)[None], {}
        logits: mx.array = model(mx.array(tokens)[None], cache=self._layers)[0]
        return logits

    def wait(self) -> None:
        """Compute what has been fed, without logits that nobody has asked for."""
        mx.eval([part.inner.state for part in self._parts])

    def mask(self, held: Positions, window: int | None) -> mx.array:
        """Return a boolean mask (L, S + rows' tokens so far): the rows' own tokens up to each, and all in front.

        Args:
            held: positions of the S tokens in front.
            window: positions that a token sees, itself included; None: all.
        """
        if window not in self._masks:
            numbers, positions = (mx.array(array) for array in (self._numbers, self._positions))
            own, at = numbers[-self._coming :, None], positions[-self._coming :, None]
            mask = (own == numbers) & (at >= positions)
            mask = mx.concatenate([mx.ones((self._coming, held.size), mx.bool_), mask], axis=1)
            if window is not None:
                mask = mask & (at - mx.concatenate([mx.array(held), positions]) < window)
            self._masks[window] = mask
        return self._masks[window]
