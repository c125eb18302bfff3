"""A small part of a KV cache, on which the model that filled it drafts (TriForce, section 4.1).

The cache is cut into chunks, and each KV head keeps those with the most attention of the last accepted token's queries.
It always keeps the first chunk, which holds the attention sink, and a ring with exact copies of the most recent tokens.
Keys keep their rotation: dropped chunks leave gaps, and nothing moves.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask

from ..cache.positioned import PositionedKVCache
from ..errors import SparseUnsupportedError

__all__ = ["RetrievalKVCache", "attention_shares", "best_chunks"]

_MAX_RING = 512
_SHORTLIST = 4  # factor of chunks chosen by their mean keys, then compared by their own keys
_CARRY = 0.25  # part of a chunk's score that the next one gets at least: copied text continues there


def attention_shares(queries: mx.array, keys: mx.array, per_chunk: int) -> mx.array:
    """Return the share of one token's attention, softmax(q k / sqrt(D)), on each chunk, per KV head, (H_kv, C).

    The maximum over query heads with common keys counts, so that one retrieving head is not outvoted (the paper has no
    such heads).

    Args:
        queries: (H, D), rotated.
        keys: (H_kv, C * per_chunk, D): a chunk's own keys, or one mean of them.
    """
    heads, D = keys.shape[0], keys.shape[-1]
    grouped = queries.reshape(heads, -1, D).astype(keys.dtype)
    logits = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32) * D**-0.5
    shares = mx.softmax(logits, axis=-1)
    return shares.reshape(*shares.shape[:2], -1, per_chunk).sum(axis=-1).max(axis=1)


def best_chunks(scores: mx.array, count: int) -> mx.array:
    """Return the `count` best of C chunks per KV head, (H_kv, count), ascending, always with chunk 0.

    Passages cross the borders of chunks: a quarter of a score carries over to the next chunk.
    """
    scores = mx.concatenate([scores[:, :1], mx.maximum(scores[:, 1:], _CARRY * scores[:, :-1])], axis=1)
    scores[:, 0] = mx.inf
    chosen = mx.argpartition(-scores, min(count, scores.shape[1] - 1), axis=-1)[:, :count]
    return mx.sort(chosen, axis=-1)


class RetrievalKVCache(_BaseCache):  # type: ignore[misc]
    """Chosen chunks, then a ring of exact recent tokens, then the draft's tokens; (1, H_kv, S, D).

    Follows mlx-lm's cache protocol. Drafted tokens can be trimmed.

    Args:
        source: the full cache; holds only committed tokens during `rebuild` and `follow`.
        budget: tokens of chosen chunks and ring together.
        chunk: tokens per chunk.
    """

    def __init__(self, source: PositionedKVCache | KVCache, budget: int, chunk: int) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.source = source
        self.chunk = chunk
        self.ring = max(2 * chunk, min(budget // 4, _MAX_RING))
        self.chunks = max(1, (budget - self.ring) // chunk)
        self.chosen: mx.array | None = None
        self._means: mx.array | None = None
        self._start = 0  # slot of the source at the ring's start
        self._size = 0
        self.offset: Any = source.offset

    @property
    def full(self) -> bool:
        """Return whether the ring has no room for the tokens generated since the last `rebuild`."""
        return self.keys is None or _slots(self.source) - self._start > self.ring

    def rebuild(self, queries: mx.array) -> None:
        """Choose chunks again. queries (H, D): of the last token in the source."""
        slots, chunk = _slots(self.source), self.chunk
        candidates = max(0, slots - self.ring // 2) // chunk
        self._start = candidates * chunk
        keys, values = self.source.keys, self.source.values
        if candidates:
            self.chosen = self._choice(queries, candidates)
            picked = [self._gathered(array, self.chosen) for array in (keys, values)]
        else:
            self.chosen, picked = None, [array[..., :0, :] for array in (keys, values)]
        # Room for a full ring and a proposal, so that following and drafting write in place.
        room = self.ring + 2 * chunk
        self.keys, self.values = (mx.pad(array, [(0, 0), (0, 0), (0, room), (0, 0)]) for array in picked)
        self.follow()

    def follow(self) -> None:
        """Drop drafted tokens, and copy the ring from the source."""
        assert self.keys is not None
        assert self.values is not None
        begin, slots = self._picked, _slots(self.source)
        end = begin + slots - self._start
        self._reserve(end)
        self.keys[..., begin:end, :] = self.source.keys[..., self._start : slots, :]
        self.values[..., begin:end, :] = self.source.values[..., self._start : slots, :]
        self._size = end
        self.offset = self.source.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        begin, end = self._size, self._size + keys.shape[2]
        self._reserve(end)
        assert self.keys is not None
        assert self.values is not None
        self.keys[..., begin:end, :] = keys
        self.values[..., begin:end, :] = values
        self._size = end
        self.offset += keys.shape[2]
        return self.keys[..., :end, :], self.values[..., :end, :]

    def trim(self, n: int) -> int:
        self._size -= n
        self.offset -= n
        return n

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None:
            raise SparseUnsupportedError("a window over a full cache can't be kept when chunks are left out")
        return create_attention_mask(N, self._size, return_array, None)

    def size(self) -> int:
        return self._size

    def empty(self) -> bool:
        return self.keys is None

    @property
    def _picked(self) -> int:
        return 0 if self.chosen is None else int(self.chosen.shape[1]) * self.chunk

    def _choice(self, queries: mx.array, candidates: int) -> mx.array:
        scores = attention_shares(queries, self._mean_keys(candidates), 1)
        short = best_chunks(scores, min(_SHORTLIST * self.chunks, candidates))
        own = attention_shares(queries, self._gathered(self.source.keys, short)[0], self.chunk)
        scores = mx.put_along_axis(mx.zeros_like(scores), short, own, axis=-1)
        return best_chunks(scores, min(self.chunks, candidates))

    def _mean_keys(self, count: int) -> mx.array:
        """Return the mean keys of the first `count` chunks, (H_kv, count, D). Each mean is computed once."""
        done = 0 if self._means is None else int(self._means.shape[1])
        if count > done:
            fresh: mx.array = self.source.keys[0, :, done * self.chunk : count * self.chunk]
            fresh = fresh.reshape(fresh.shape[0], -1, self.chunk, fresh.shape[-1]).mean(axis=2)
            self._means = fresh if self._means is None else mx.concatenate([self._means, fresh], axis=1)
        assert self._means is not None
        return self._means

    def _gathered(self, array: mx.array, chunks: mx.array) -> mx.array:
        """Gather chunks (H_kv, n) of an array by token: gathering by chunk would copy the whole cache first."""
        slots = (chunks[..., None] * self.chunk + mx.arange(self.chunk)).reshape(1, array.shape[1], -1, 1)
        return mx.take_along_axis(array, slots, axis=2)

    def _reserve(self, end: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        missing = end - self.keys.shape[2]
        if missing > 0:
            grow = [(0, 0), (0, 0), (0, missing + self.chunk), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, grow), mx.pad(self.values, grow)


def _slots(source: PositionedKVCache | KVCache) -> int:
    return source.slots if isinstance(source, PositionedKVCache) else int(source.offset)
