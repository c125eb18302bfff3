"""Prompt caches as rows of a batch. Each row keeps its own caches, of any length; a model sees one cache per layer.

A step feeds one token per row. The cache of a layer hands each row's token to the row's own cache, and returns what the
rows have stored as `RowTokens`. Models pass these on to attention, which reads row by row (`adapters/row_attention`).
Nothing is padded, and no row's keys are copied when another one joins or leaves.

States of recurrent layers have no length: those of all rows lie in one array for as long as the rows stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache, _BaseCache

from .positioned import Positioned, leaves

_OWN = (Positioned, KVCache, QuantizedKVCache, RotatingKVCache)  # caches of tokens, which stay the rows' own


class RowColumns(mx.array):
    """Keys of several rows, transposed. A subclass, so that Python asks it first for the product with queries."""

    def __init__(self, rows: Sequence[mx.array], caches: Sequence[Any]) -> None:
        super().__init__(0)  # never read
        self.rows, self.caches = rows, caches

    def __rmatmul__(self, queries: mx.array) -> RowTokens:  # type: ignore[misc]
        """Return the rows' products with queries (B, H, 1, D)."""
        each = zip(mx.split(queries, len(self.rows)), self.rows, strict=True)
        return RowTokens([query @ keys for query, keys in each], self.caches)


class RowTokens(NamedTuple):
    """Keys, values or masks of several rows, for attention.

    Attributes:
        rows: of each row (1, H, S_i, D), or a triple of quantised arrays; masks over S_i keys, or None.
        caches: the rows' own caches.
    """

    rows: Sequence[Any]
    caches: Sequence[Any]

    def swapaxes(self, first: int, second: int) -> RowColumns:
        """Transpose the rows: latent attention adds one product with keys to the mask of another."""
        return RowColumns([row.swapaxes(first, second) for row in self.rows], self.caches)


class RowCaches(_BaseCache):  # type: ignore[misc]
    """One layer's cache of several rows, which holds nothing of its own."""

    def __init__(self, caches: Sequence[Any]) -> None:
        self.caches = caches
        self._offset: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Return the position of each row's next token, (B,) int32."""
        if self._offset is None:
            self._offset = mx.array([cache.offset for cache in self.caches], dtype=mx.int32)
        return self._offset

    def make_mask(self, N: int, **kwargs: Any) -> RowTokens | None:
        """Return the rows' masks over the tokens that the next one will fetch; None if every row sees all of them."""
        masks = [cache.make_mask(N, **kwargs) for cache in self.caches]
        return None if all(mask is None for mask in masks) else RowTokens(masks, self.caches)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowTokens, RowTokens]:
        """Store one token per row, (B, H, 1, D), and return all tokens."""
        self._offset = None
        count = len(self.caches)
        new = zip(self.caches, mx.split(keys, count), mx.split(values, count), strict=True)
        stored = [cache.update_and_fetch(key, value) for cache, key, value in new]
        fetched, others = zip(*stored, strict=True)
        return RowTokens(fetched, self.caches), RowTokens(others, self.caches)

    def keys_and_values(self) -> tuple[RowTokens, RowTokens]:
        """Return all tokens, for layers that read another one's cache."""
        keys, values = zip(*(cache.keys_and_values() for cache in self.caches), strict=True)
        return RowTokens(keys, self.caches), RowTokens(values, self.caches)

    @property
    def keys(self) -> Any:
        """Return one row's keys, to which some models tie other work of the forward."""
        return self.caches[0].keys

    @keys.setter
    def keys(self, value: Any) -> None:
        self.caches[0].keys = value

    @property
    def state(self) -> Any:
        return [cache.state for cache in self.caches]

    @property
    def nbytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self.caches)


def can_share(cache: Sequence[Any]) -> bool:
    """Return whether this prompt cache can be a row beside others."""
    return all(type(leaf) is ArraysCache or _is_own(leaf) for leaf in leaves(cache))


def _is_own(leaf: Any) -> bool:
    return isinstance(leaf, _OWN) and getattr(leaf, "keep", 0) == 0


def gather(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one cache per layer for these prompt caches. It takes their recurrent states until `scatter`."""
    return [_gather(layer) for layer in zip(*rows, strict=True)]


def _gather(layer: Sequence[Any]) -> Any:
    first = layer[0]
    if isinstance(first, CacheList):
        return CacheList(*(_gather(parts) for parts in zip(*(cache.caches for cache in layer), strict=True)))
    if not isinstance(first, ArraysCache):
        return RowCaches(layer)
    together = ArraysCache(len(first.cache))
    together.cache = [_stacked(states) for states in zip(*(own.cache for own in layer), strict=True)]
    for own in layer:
        own.cache = [None] * len(own.cache)
    return together


def _stacked(states: Sequence[mx.array | None]) -> mx.array | None:
    """Return the rows' states, one below the other; zeros for a row that has none yet."""
    held = next((state for state in states if state is not None), None)
    return None if held is None else mx.concatenate([mx.zeros_like(held) if s is None else s for s in states])


def scatter(shared: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    """Give recurrent states back to the prompt caches that `gather` took them from."""
    for index, row in enumerate(rows):
        for together, own in _states(shared, row):
            own.cache = [None if array is None else mx.contiguous(array[index : index + 1]) for array in together.cache]


def _states(shared: Sequence[Any], row: Sequence[Any]) -> Iterator[tuple[ArraysCache, ArraysCache]]:
    pairs = zip(leaves(shared), leaves(row), strict=True)
    return ((together, own) for together, own in pairs if isinstance(own, ArraysCache))
