"""Batches of quantised KV caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from .batch_storage import BatchRow
from .batched import PositionedBatch
from .positioned import Runs

__all__ = ["QuantizedBatchKVCache"]


class QuantizedBatchKVCache(PositionedBatch):
    """Full attention, for mlx-lm's `QuantizedKVCache` rows with equal bits and group size.

    Keys and values are triples, as in those rows: packed values (C, H, S, D * bits / 32) uint32, scales and biases (C,
    H, S, D / group_size). A row joins and leaves with its own triples; only new tokens are quantised. As in those rows,
    `offset` counts slots: the caller adds the rows' shifts (`adjusted_offsets`).

    Attributes:
        group_size, bits: the names that mlx-lm's attention looks for.
    """

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__()
        self.group_size = group_size
        self.bits = bits

    @classmethod
    def _like(cls, cache: QuantizedKVCache) -> QuantizedBatchKVCache:
        return cls(cache.group_size, cache.bits)

    def _joining(self, cache: QuantizedKVCache) -> BatchRow:
        count = int(cache.offset)
        return BatchRow(Runs([(0, count)] if count else []), count, count, 0)

    def _as_stored(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        return [part for array in (keys, values) for part in mx.quantize(array, self.group_size, self.bits)]

    def _halves(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        half = len(arrays) // 2
        return tuple(arrays[:half]), tuple(arrays[half:])

    def extract(self, idx: int) -> QuantizedKVCache:
        cache = QuantizedKVCache(self.group_size, self.bits)
        cache.offset = self._stored(self._rows[idx])
        if arrays := self._copied(idx, cache.offset):
            cache.keys, cache.values = self._halves(arrays)
        return cache
