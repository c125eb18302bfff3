"""Whole prompt caches as rows of a batch: which may share one; how they are merged, extended, filtered and split."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, QuantizedKVCache

from .batched import PositionedBatch, QuantizedBatchKVCache
from .positioned import Positioned, leaves


def batch_key(cache: Sequence[Any]) -> Hashable | None:
    """Return a key that is equal for prompt caches of one model that can share a batch; None if this one can't be
    batched.
    """
    kinds = tuple(_kind(leaf) for leaf in leaves(cache))
    return None if None in kinds else kinds


def _kind(leaf: Any) -> Hashable | None:
    if isinstance(leaf, Positioned):
        return type(leaf), getattr(leaf, "max_size", None)
    if isinstance(leaf, QuantizedKVCache):
        return type(leaf), leaf.group_size, leaf.bits
    # mlx-lm's own batch form of a ring drops tokens that should be kept.
    if not hasattr(leaf, "merge") or getattr(leaf, "keep", 0) != 0:
        return None
    return type(leaf), len(leaf.cache) if isinstance(leaf, ArraysCache) else getattr(leaf, "max_size", None)


def merge_rows(caches: Sequence[Sequence[Any]]) -> list[Any]:
    """Merge prefilled prompt caches with one row each into one batch cache per layer."""
    batch = [_merge(layer) for layer in zip(*caches, strict=True)]
    parts = _positioned_batches(batch)
    for index, part in enumerate(parts):
        part.part = index, len(parts)
    return batch


def extend_batch(batch: Sequence[Any], other: Sequence[Any]) -> None:
    """Add the rows of `other` to `batch`."""
    for ours, theirs in zip(batch, other, strict=True):
        ours.extend(theirs)


def filter_batch(batch: Sequence[Any], keep: Sequence[int]) -> None:
    """Keep these rows only, in this order. If the last row takes the place of one that leaves, only it is copied."""
    parts = list(leaves(batch))
    lifted = [part.lift(keep) if isinstance(part, PositionedBatch) else None for part in parts]
    mx.eval(lifted)  # all at once
    for part, rows in zip(parts, lifted, strict=True):
        part.filter(list(keep)) if rows is None else part.filter(list(keep), rows)


def make_room(batch: Sequence[Any], rows: int, longest: Sequence[Any], until: float = math.inf) -> bool:
    """Copy caches layer by layer to make room for `rows` new rows; return whether they fit.

    Args:
        longest: prompt cache of the new row with the most tokens.
        until: by `time.monotonic`, after which no further layer starts; the first one always does.
    """
    slots = {id(ours): _tokens(theirs) for ours, theirs in zip(leaves(batch), leaves(longest), strict=True)}
    return _copy_rings(
        batch,
        lambda part: not part.fits(rows, slots[id(part)]),
        lambda part: part.make_room(rows, slots[id(part)]),
        until,
    )


def give_back(batch: Sequence[Any], until: float = math.inf) -> bool:
    """Compact the caches with too much idle space, layer by layer; return whether all are done.

    Args:
        until: as in `make_room`.
    """
    return _copy_rings(batch, lambda part: part.oversized, lambda part: part.compact(), until)


def row_bytes(cache: Sequence[Any], rows: int) -> list[int]:
    """Return the bytes of each row's tokens. Recurrent states have no length.

    Args:
        cache: a batch, or the prompt cache of a single row.
        rows: how many it has.
    """
    parts = [part for part in leaves(cache) if isinstance(part, (PositionedBatch, Positioned, QuantizedKVCache))]
    return [sum(layers) for layers in zip(*map(_row_bytes, parts), strict=True)] or [0] * rows


def _row_bytes(part: PositionedBatch | Positioned | QuantizedKVCache) -> list[int]:
    if isinstance(part, PositionedBatch):
        return part.row_bytes
    if part.empty():
        return [0]
    keys = part.keys[0] if isinstance(part, QuantizedKVCache) else part.keys
    return [int(part.nbytes) // keys.shape[2] * _tokens(part)]


def padding_bytes(batch: Sequence[Any]) -> int:
    """Return the bytes of the caches beside their rows' tokens and these rows' room to grow; 0 for a single row."""
    return sum(part.padding for part in _positioned_batches(batch))


def limit_idle(batch: Sequence[Any], most: int) -> None:
    """Let at most this many bytes of a batch lie idle from now on. `give_back` frees the rest."""
    for part in _positioned_batches(batch):
        part.most_idle = most


def _tokens(leaf: Any) -> int:
    """Return the number of stored tokens. mlx-lm's quantised cache does not report its size."""
    return int(leaf.offset if isinstance(leaf, QuantizedKVCache) else leaf.size())


def _positioned_batches(batch: Sequence[Any]) -> list[PositionedBatch]:
    return [part for part in leaves(batch) if isinstance(part, PositionedBatch)]


def _copy_rings(
    batch: Sequence[Any],
    wanted: Callable[[PositionedBatch], bool],
    copy: Callable[[PositionedBatch], None],
    until: float,
) -> bool:
    """Copy all rings or none: the slots in use depend on the layout, and layers share a mask."""
    parts = _positioned_batches(batch)
    rings = [part for part in parts if part.max_size is not None]
    units = [rings, *([part] for part in parts if part.max_size is None)]
    for done, unit in enumerate([unit for unit in units if any(wanted(part) for part in unit)]):
        if done and time.monotonic() >= until:
            return False
        for part in unit:
            copy(part)
        mx.eval([part.state for part in unit])
    return True


def extract_row(batch: Sequence[Any], index: int) -> list[Any]:
    """Return one row as a prompt cache. The batch is unchanged."""
    return [_extract(part, index) for part in batch]


def _merge(caches: Sequence[Any]) -> Any:
    first = caches[0]
    if isinstance(first, CacheList):
        return CacheList(*(_merge(parts) for parts in zip(*(cache.caches for cache in caches), strict=True)))
    if isinstance(first, Positioned):
        return PositionedBatch.merge(caches)
    if isinstance(first, QuantizedKVCache):
        return QuantizedBatchKVCache.merge(caches)
    if isinstance(first, ArraysCache):
        merged = copy.deepcopy(first)
        for other in caches[1:]:  # mlx-lm's merge needs a row that has filled each slot
            merged.extend(other)
        return merged
    return type(first).merge(caches)


def _extract(batch: Any, index: int) -> Any:
    if isinstance(batch, CacheList):
        return CacheList(*(_extract(part, index) for part in batch.caches))
    if isinstance(batch, ArraysCache):
        row = ArraysCache(len(batch.cache))
        row.cache = [None if array is None else mx.contiguous(array[index : index + 1]) for array in batch.cache]
        return row
    return batch.extract(index)
