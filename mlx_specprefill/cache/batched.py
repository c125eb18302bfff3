"""Rows of positioned caches that decode together, join and leave at any step.

The protocol is that of mlx-lm's batch caches: merge, extend, filter, extract. Keys and values of all rows lie in one
array, right-justified on a common write slot; what differs per row (where its tokens lie, how many there are) stays on
the host, so that joining and leaving never waits for the device. Rows are fed one token each per step.

Stored order is position order in every row, so whatever a row may see is its last few tokens, window or not. A mask is
therefore one number per row: how many of the most recent slots are visible.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, _BaseCache

from .positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, Positions, Runs, leaves

__all__ = [
    "PositionedBatchKVCache",
    "PositionedBatchRotatingKVCache",
    "batch_key",
    "can_batch",
    "extend_batch",
    "extract_row",
    "filter_batch",
    "merge_rows",
]

_STEP = 256  # slots added at a time, as in mlx-lm


class _Row:
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


class _PositionedBatch(_BaseCache):  # type: ignore[misc]
    """Keys and values (B, H, S, D), written at one slot for all rows; a ring once S has reached `max_size`."""

    def __init__(self, max_size: int | None = None) -> None:
        self.max_size = max_size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._write = 0  # slot of the next token
        self._wrapped = False
        self._steps = 0
        self._rows: list[_Row] = []
        self._offset: mx.array | None = None

    # --- what models use ---------------------------------------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, (B,) int32."""
        if self._offset is None:
            self._offset = mx.array([self._next(row) for row in self._rows], dtype=mx.int32)
        return self._offset

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Boolean (B, 1, 1, S) over the slots that the next token will fetch; None when every row sees all of them."""
        self._one_token(N)
        slot, size = self._next_slot()
        visible = [self._visible(row, window_size, size) for row in self._rows]
        if all(count == size for count in visible):
            return None
        ages = (slot - mx.arange(size)) % size
        return ages < mx.array(visible)[:, None, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store one token per row; keys and values (B, H, 1, D)."""
        self._one_token(keys.shape[2])
        slot, size = self._next_slot()
        self._wrapped = self._wrapped or slot < self._write
        if self.keys is None or self.values is None or size > self.keys.shape[2]:
            self._grow(keys, values)
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., slot : slot + 1, :] = keys
        self.values[..., slot : slot + 1, :] = values
        self._write = slot + 1
        self._steps += 1
        self._offset = None
        return self.keys_and_values()

    @staticmethod
    def _one_token(count: int) -> None:
        if count != 1:
            raise ValueError(f"rows of a batch are fed one token each, not {count}")

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Of all slots in use, (B, H, S, D), in the order they lie in."""
        assert self.keys is not None
        assert self.values is not None
        if self._wrapped or self._write == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., : self._write, :], self.values[..., : self._write, :]

    def _next_slot(self) -> tuple[int, int]:
        """Slot of the next token, and how many slots will then be in use."""
        if self._wrapped:
            assert self.max_size is not None
            return self._write % self.max_size, self.max_size
        if self._write == self.max_size:
            return 0, self.max_size
        return self._write, self._write + 1

    def _grow(self, keys: mx.array, values: mx.array) -> None:
        room = _STEP if self.max_size is None else min(_STEP, self.max_size - self._write)

        def grown(stored: mx.array | None, new: mx.array) -> mx.array:
            B, H, _, D = new.shape
            space = mx.zeros((B, H, room, D), new.dtype)
            return space if stored is None else mx.concatenate([stored[..., : self._write, :], space], axis=2)

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)

    # --- rows --------------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Positioned]) -> _PositionedBatch:
        """A batch of single rows, which stay as they are."""
        first = caches[0]
        batch = cls(first.max_size if isinstance(first, PositionedRotatingKVCache) else None)
        parts = []
        for cache in caches:
            runs = Runs(cache.runs.pairs())
            if batch.max_size is not None:
                runs.keep_last(batch.max_size)
            batch._rows.append(_Row(runs, cache.slots, cache.next, 0))
            parts.append((*_last(cache, runs.size), 1))
        batch._write = max(row.runs.size for row in batch._rows)
        batch._justify(parts)
        return batch

    def extend(self, other: _PositionedBatch) -> None:
        """Add the rows of `other` after these."""
        parts = [(*batch._in_order(slice(None)), len(batch._rows)) for batch in (self, other)]
        self._write = max(self._used(), other._used())
        self._wrapped = False
        later = self._steps - other._steps
        self._rows += [_Row(row.runs, row.slots, row.start, row.joined_at + later) for row in other._rows]
        self._offset = None
        self._justify(parts)

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep these rows only, in this order."""
        self._rows = [self._rows[index] for index in batch_indices]
        self._offset = None
        if self.keys is None or self.values is None:
            return
        spare = 0 if self._wrapped else self._write - max((self._stored(row) for row in self._rows), default=0)
        rows = mx.array(list(batch_indices), dtype=mx.int32)
        self.keys, self.values = (array[..., spare:, :][rows] for array in (self.keys, self.values))
        self._write -= spare

    def extract(self, idx: int) -> Positioned:
        """The row as a cache of its own, equal to the one it would have if it had been decoded alone."""
        row = self._rows[idx]
        generated = self._steps - row.joined_at
        cache = PositionedKVCache() if self.max_size is None else PositionedRotatingKVCache(self.max_size)
        cache.runs = Runs(row.runs.pairs())
        cache.runs.append(row.start, generated)
        cache.next = row.start + generated
        keys, values = self._in_order(slice(idx, idx + 1))
        if keys is None or values is None:
            return cache
        if self.max_size is not None:
            cache.runs.keep_last(self.max_size)
        count = cache.runs.size
        first = keys.shape[2] - count
        # A plain slice would keep the whole batch alive.
        keys, values = (mx.contiguous(array[..., first:, :]) for array in (keys, values))
        if self.max_size is None:
            cache.inner.state = keys, values, count
        else:
            cache.inner.state = keys, values, row.slots + generated, 0, self.max_size, count
        return cache

    def _next(self, row: _Row) -> int:
        return row.start + self._steps - row.joined_at

    def _stored(self, row: _Row) -> int:
        count = row.runs.size + self._steps - row.joined_at
        return count if self.max_size is None else min(count, self.max_size)

    def _used(self) -> int:
        """Slots in use."""
        return self._write if self.max_size is None or not self._wrapped else self.max_size

    def _visible(self, row: _Row, window: int | None, size: int) -> int:
        """How many of the last tokens the next one of this row sees, itself included."""
        held = min(self._stored(row) + 1, size)
        if self.max_size is not None:  # a dense ring holds no more, whatever window is asked for
            window = min(window or self.max_size, self.max_size)
        if window is None:
            return held
        own = self._steps - row.joined_at + 1  # since it joined, and the next: these have no gaps
        if own >= window:
            return window
        return min(held, own + row.count_from(row.start + own - window))

    def _in_order(self, rows: slice) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values of some rows, oldest slot first and without unused slots."""
        if self.keys is None or self.values is None:
            return None, None
        keys, values = self.keys[rows, :, : self._used()], self.values[rows, :, : self._used()]
        if self._wrapped:
            keys, values = (mx.roll(array, -self._write, 2) for array in (keys, values))
        return keys, values

    def _justify(self, parts: Sequence[tuple[mx.array | None, mx.array | None, int]]) -> None:
        """Set keys and values to those of `parts` (keys, values, rows), padded in front up to the write slot."""
        room = _STEP if self.max_size is None else min(_STEP, self.max_size - self._write)
        rows = [count for _, _, count in parts]
        self.keys = _stacked([keys for keys, _, _ in parts], rows, self._write, room)
        self.values = _stacked([values for _, values, _ in parts], rows, self._write, room)

    # --- the rest of the protocol ------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return self.keys, self.values

    def size(self) -> int:
        return self._used()

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)


class PositionedBatchKVCache(_PositionedBatch):
    """Full attention, of `PositionedKVCache` rows."""


class PositionedBatchRotatingKVCache(_PositionedBatch):
    """Sliding windows over original positions, of `PositionedRotatingKVCache` rows of one size."""


def _last(cache: Positioned, count: int) -> tuple[mx.array | None, mx.array | None]:
    """Keys and values of the last `count` tokens of a single row, in order."""
    inner = cache.inner
    if inner.keys is None or count == 0:
        return None, None
    if isinstance(inner, RotatingKVCache):
        keys, values = inner._temporal_order(inner.keys), inner._temporal_order(inner.values)
    else:
        keys, values = inner.keys_and_values()
    return keys[..., -count:, :], values[..., -count:, :]


def _stacked(parts: Sequence[mx.array | None], rows: Sequence[int], size: int, room: int) -> mx.array | None:
    """Parts (B_i, H, S_i, D) as one array (sum of B_i, H, size + room, D) in which they all end at `size`."""
    example = next((part for part in parts if part is not None), None)
    if example is None:
        return None
    _, H, _, D = example.shape
    padded = []
    for part, count in zip(parts, rows, strict=True):
        if part is None:
            padded.append(mx.zeros((count, H, size + room, D), example.dtype))
        else:
            padded.append(mx.pad(part, [(0, 0), (0, 0), (size - part.shape[2], room), (0, 0)]))
    return mx.concatenate(padded) if len(padded) > 1 else padded[0]


# --- whole prompt caches ---------------------------------------------------------------------------------------------


def batch_key(cache: Sequence[Any]) -> Hashable | None:
    """Equal for the prompt caches of one model that can decode as one batch; None if this one can't be batched."""
    kinds = tuple(_kind(leaf) for leaf in leaves(cache))
    return None if None in kinds else kinds


def can_batch(cache: Sequence[Any]) -> bool:
    """Whether the caches of every layer have a batch form. Quantised and chunked ones have none."""
    return batch_key(cache) is not None


def _kind(leaf: Any) -> Hashable | None:
    if isinstance(leaf, Positioned):
        return type(leaf), getattr(leaf, "max_size", None)
    # mlx-lm's own batch twin of a ring forgets tokens that are kept for good.
    if not hasattr(leaf, "merge") or getattr(leaf, "keep", 0) != 0:
        return None
    return type(leaf), len(leaf.cache) if isinstance(leaf, ArraysCache) else getattr(leaf, "max_size", None)


def merge_rows(caches: Sequence[Sequence[Any]]) -> list[Any]:
    """One batch cache per layer of prefilled prompt caches with one row each."""
    return [_merge(layer) for layer in zip(*caches, strict=True)]


def extend_batch(batch: Sequence[Any], other: Sequence[Any]) -> None:
    """Add the rows of `other` to `batch`."""
    for ours, theirs in zip(batch, other, strict=True):
        ours.extend(theirs)


def filter_batch(batch: Sequence[Any], keep: Sequence[int]) -> None:
    """Keep these rows only, in this order."""
    for part in batch:
        part.filter(list(keep))


def extract_row(batch: Sequence[Any], index: int) -> list[Any]:
    """One row as a prompt cache of its own; the batch stays as it is."""
    return [_extract(part, index) for part in batch]


def _merge(caches: Sequence[Any]) -> Any:
    first = caches[0]
    if isinstance(first, CacheList):
        return CacheList(*(_merge(parts) for parts in zip(*(cache.caches for cache in caches), strict=True)))
    if isinstance(first, PositionedKVCache):
        return PositionedBatchKVCache.merge(caches)
    if isinstance(first, PositionedRotatingKVCache):
        return PositionedBatchRotatingKVCache.merge(caches)
    if isinstance(first, ArraysCache):
        return _merge_states(caches)
    return type(first).merge(caches)


def _merge_states(caches: Sequence[ArraysCache]) -> ArraysCache:
    """As mlx-lm's, which can't merge a slot that no row has filled."""
    merged = ArraysCache(len(caches[0].cache))
    for slot in range(len(merged.cache)):
        rows = [cache[slot] for cache in caches]
        example = next((row for row in rows if row is not None), None)
        if example is not None:
            merged[slot] = mx.concatenate([mx.zeros_like(example) if row is None else row for row in rows])
    return merged


def _extract(batch: Any, index: int) -> Any:
    if isinstance(batch, CacheList):
        return CacheList(*(_extract(part, index) for part in batch.caches))
    if isinstance(batch, ArraysCache):
        row = ArraysCache(len(batch.cache))
        row.cache = [None if array is None else mx.contiguous(array[index : index + 1]) for array in batch.cache]
        return row
    return batch.extract(index)
