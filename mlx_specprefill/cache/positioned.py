"""Holds each token's position beside its slot: caches, their masks, windows, snapshots and quantised form.

mlx-lm's caches use one number for both: the storage slot and the RoPE position. After a sparse prefill the two differ
by the sequence's shift. Here an ordinary mlx-lm cache keeps the storage, and `HeldTokens` beside it the positions.
Models see the position (through `offset`) and never the slot. A cache without gaps behaves, and computes, exactly as
the mlx-lm cache inside it.

Tokens are stored in the order of feeding. Their positions ascend, except for recalled tokens: those have earlier
positions and are stored behind the rest. A token sees stored tokens at positions up to its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    _BaseCache,
    make_prompt_cache,
)

from ..arrays import Bools, Positions
from ..errors import SparseUnsupportedError
from .held import HeldTokens

_GROUPS = 64, 32  # values that share a scale in MLX: as many as divide a head


class Positioned(_BaseCache):  # type: ignore[misc]
    """A mlx-lm cache plus the positions of its tokens.

    `place` sets the positions of the next forward; by default they follow the last position. `offset`, the only
    attribute that models read, is an int while those positions are consecutive, else an int32 matrix (1, L).

    Attributes:
        next: the position after the highest one; a recall does not change it.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.held = HeldTokens()
        self.next = 0
        self._placed: tuple[Positions, int | mx.array] | None = None
        self._slots: mx.array | None = None  # that the next forward's tokens take from estimates

    @property
    def offset(self) -> int | mx.array:
        return self.next if self._placed is None else self._placed[1]

    @property
    def slots(self) -> int:
        """Return the number of stored tokens (the next slot)."""
        return int(self.inner.offset)

    @property
    def stored(self) -> int:
        """Return the end of what is stored, among the rows of `keys`; the latest tokens stand in front of it."""
        return self.slots

    @property
    def shift(self) -> int:
        return self.next - self.slots

    @property
    def keys(self) -> Any:
        return self.inner.keys

    @keys.setter
    def keys(self, value: mx.array) -> None:
        self.inner.keys = value

    @property
    def values(self) -> Any:
        return self.inner.values

    @values.setter
    def values(self, value: mx.array) -> None:
        self.inner.values = value

    def place(self, positions: Positions, on_device: mx.array) -> None:
        """Set the positions of the next forward: all after the cache's tokens, or all before `next` (a recall).

        Args:
            positions: (L,), ascending; the cache holds none of them, or estimates.
            on_device: the same as (1, L) int32.
        """
        if positions.size == 0 or positions[0] < self.next <= positions[-1]:
            raise ValueError("positions must be non-empty and all follow, or all precede, the next position")
        first = int(positions[0])
        consecutive = positions[-1] - first + 1 == positions.size
        if consecutive and first >= self.next:
            self.next, self._placed = first, None
        else:
            self._placed = positions, first if consecutive else on_device
            if self.held.size and first < self.next and self.held.holds(positions).any():
                self._replace(positions)

    def estimate(
        self, positions: Positions, keys: mx.array, values: mx.array, reading: Bools, on_device: mx.array
    ) -> None:
        """Hold estimates, and set the positions of the next forward among them.

        Args:
            positions: (N,), ascending, all after the cache's tokens.
            keys, values: (1, H, N, D).
            reading: (N,) the tokens of the next forward, which take the places of their estimates.
            on_device: the positions of these, (1, L) int32.
        """
        start = self._store(keys, values)
        self.held.extend(np.where(reading, positions, ~positions))
        self.next = int(positions[-1]) + 1
        self._placed = positions[reading], on_device
        self._slots = mx.array(start + np.flatnonzero(reading))

    def _store(self, keys: mx.array, values: mx.array) -> int:
        """Store keys and values behind the others. Return the slot of the first one."""
        self.inner.update_and_fetch(keys, values)
        return self.slots - int(keys.shape[2])

    def _replace(self, positions: Positions) -> None:
        """Let the next forward's tokens take the places of their estimates; those without one come last."""
        absent = positions[~self.held.holds(positions)]
        if absent.size:
            self._store(*(_zeros(array, absent.size) for array in (self.keys, self.values)))
        self._slots = mx.array(self.held.read_again(positions))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._slots is not None:
            return self._take_places(self._slots, keys, values)
        self._record(keys.shape[2])
        fetched: tuple[mx.array, mx.array] = self.inner.update_and_fetch(keys, values)
        return fetched

    def _take_places(self, slots: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if keys.shape[2] != slots.size:
            raise ValueError(f"{slots.size} positions were placed for {keys.shape[2]} tokens")
        self.inner.keys[..., slots, :] = keys
        self.inner.values[..., slots, :] = values
        self._placed = self._slots = None
        return self.inner.keys[..., : self.held.size, :], self.inner.values[..., : self.held.size, :]

    def keys_and_values(self) -> Any:
        return self.inner.keys_and_values()

    def _record(self, count: int) -> None:
        if self._placed is None:
            self.held.append(self.next, count)
        else:
            positions, _ = self._placed
            if positions.size != count:
                raise ValueError(f"{positions.size} positions were placed for {count} tokens")
            self.held.extend(positions)
            self._placed = None
        self.next = max(self.next, self.held.end)

    @property
    def _recalling(self) -> bool:
        return self._placed is not None and int(self._placed[0][-1]) < self.next

    def _visible(self, held: HeldTokens, count: int) -> Positions:
        """Return the positions of the keys that the next forward is given, in their order."""
        return held.positions if self._slots is not None else np.concatenate([held.positions, self._coming(count)])

    def _coming(self, count: int) -> Positions:
        """Return the positions of the next forward's tokens."""
        if self._placed is not None:
            return self._placed[0]
        return np.arange(self.next, self.next + count, dtype=np.int32)

    def _joins(self, stored: HeldTokens) -> bool:
        """Return whether no position is missing between these and the next forward's tokens."""
        return self._placed is None and stored.contiguous and (stored.size == 0 or stored.end == self.next)

    def size(self) -> int:
        return int(self.inner.size())

    def empty(self) -> bool:
        return bool(self.inner.empty())

    @property
    def nbytes(self) -> int:
        return int(self.inner.nbytes)

    def is_trimmable(self) -> bool:
        return bool(self.inner.is_trimmable())

    def trim(self, n: int) -> int:
        """Go back by n positions (not slots): drop the first token at or after `next - n` and all fed after it."""
        n = min(self.next, n)
        self.inner.trim(self.held.drop_from(self.next - n))
        self.next -= n
        return n

    @property
    def state(self) -> Any:
        return self.inner.state, self.next, self.held.runs()

    @state.setter
    def state(self, value: Any) -> None:
        inner_state, self.next, runs = value
        self.inner = self.inner_type.from_state(inner_state)
        self.held = HeldTokens([(int(start), int(count), bool(estimated)) for start, count, estimated in runs])
        self._placed = self._slots = None

    inner_type: type[Any] = KVCache


class PositionedKVCache(Positioned):
    """Full attention.

    Tokens fed earlier have lower positions, recalled ones aside, so the mask by slot is the mask by position. Recalled
    tokens themselves, and windows over gaps, need a mask by position.
    """

    def __init__(self) -> None:
        super().__init__(KVCache())

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if not self._recalling and (window_size is None or self._joins(self.held)):
            return self.inner.make_mask(N, window_size=window_size, return_array=return_array)
        return _mask(self._visible(self.held, N), self._coming(N), window_size)


class PositionedRotatingKVCache(Positioned):
    """Sliding window over original positions, on a ring that holds the last `max_size` stored tokens.

    With dropped tokens the ring reaches further back than the window. So it holds every visible token, and the mask by
    position hides the others in prefill and decode. A mask by slot would widen the window by 1 / keep.
    """

    inner_type = RotatingKVCache

    def __init__(self, max_size: int) -> None:
        super().__init__(RotatingKVCache(max_size=max_size))

    @property
    def max_size(self) -> int:
        return int(self.inner.max_size)

    def _record(self, count: int) -> None:
        self.held.keep_last(self.max_size - 1)
        super()._record(count)

    def _store(self, keys: mx.array, values: mx.array) -> int:
        self.held.keep_last(self.max_size - 1)
        self.inner._update_concat(keys, values)  # one token's ordinary update takes the oldest one's place
        return int(self.inner.keys.shape[2] - keys.shape[2])

    @property
    def stored(self) -> int:
        return int(self.inner.keys.shape[2])  # as long as no token was fed alone

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if self._slots is not None:
            return _mask(self.held.positions, self._coming(N), window_size or self.max_size)
        held = HeldTokens(self.held.runs())
        held.keep_last(self.max_size - 1)
        if self._joins(held):
            return self.inner.make_mask(N, window_size=window_size, return_array=return_array)
        window = window_size or self.max_size
        coming = self._coming(N)
        stored = held.positions
        if N > 1:
            return _mask(np.concatenate([stored, coming]), coming, window)
        reach = min(window, self.max_size)  # a dense ring holds no more, whatever the window (plamo3)
        visible = coming[0] - np.concatenate([stored, coming]) < reach
        if visible.all():
            return None
        return mx.array(np.roll(visible, self._ring_start(visible.size)))

    def _ring_start(self, size: int) -> int:
        """Return the slot of the oldest token once the next one is written."""
        if size < self.max_size:
            return 0
        write = 0 if self.inner._idx >= self.max_size else self.inner._idx
        return int(write + 1) % self.max_size


# A composite looks up the classes of its parts by name in that module when its state is restored.
for _kind in (PositionedKVCache, PositionedRotatingKVCache):
    setattr(mlx_lm_cache, _kind.__name__, _kind)


def _mask(visible: Positions, coming: Positions, window: int | None) -> mx.array:
    """Return a boolean mask (L, S), for one token (1, 1, 1, S): causal by position, and within `window` positions.

    Args:
        visible: positions of the keys, (S,).
        coming: those of the queries, (L,).
    """
    keys = mx.array(visible)[None]
    queries = mx.array(coming)[:, None]
    mask: mx.array = keys <= queries
    if window is not None:
        mask = mask & (queries - keys < window)
    return mask if coming.size > 1 else mask[None, None]  # deepseek_v32 slices one token's mask along 4 axes


def _make_positioned(cache: Any) -> Any:
    if type(cache) is KVCache:
        return PositionedKVCache()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return PositionedRotatingKVCache(cache.max_size)
    if type(cache) is CacheList:
        return CacheList(*(_make_positioned(part) for part in cache.caches))
    if isinstance(cache, ArraysCache):
        return cache  # recurrent state has no positions
    raise SparseUnsupportedError(f"its cache type {type(cache).__name__} can't hold original positions")


def make_positioned_cache(model: nn.Module) -> list[Any]:
    """Return the model's empty prompt cache with positions.

    Raises:
        SparseUnsupportedError: a cache class that can't separate positions and storage.
    """
    return [_make_positioned(cache) for cache in make_prompt_cache(model)]


def leaves(cache: Sequence[Any]) -> Iterator[Any]:
    """Return the caches inside a prompt cache, composites opened."""
    for part in cache:
        if isinstance(part, CacheList):
            yield from leaves(part.caches)
        else:
            yield part


def tokens_in(cache: Sequence[Any]) -> int:
    """Return the number of tokens that a prompt cache has read."""
    return max((int(part.offset) for part in leaves(cache) if hasattr(part, "offset")), default=0)


def estimated_tokens(cache: Sequence[Any]) -> int:
    """Return the number of tokens of which a prompt cache holds estimates."""
    return max((int((part.held.marked < 0).sum()) for part in leaves(cache) if isinstance(part, Positioned)), default=0)


def place(cache: Sequence[Any], positions: Positions) -> None:
    """Set the positions of the next forward in every layer. positions: (L,) int32, as in `Positioned.place`."""
    positions = np.asarray(positions, dtype=np.int32)
    on_device = mx.array(positions)[None]
    for part in leaves(cache):
        if isinstance(part, Positioned):
            part.place(positions, on_device)


@contextmanager
def recalling(cache: Sequence[Any]) -> Iterator[None]:
    """Feed dropped tokens inside this block, behind what the cache holds; afterwards it is consistent.

    What a recalled token sees depends on the layer:

    - Full attention: all that the cache holds by then at positions up to its own, which is the original one. A window
      restricts it to positions within the window.
    - Recurrent layers: everything that was fed before it, in the order of feeding.
    - Sliding windows on a ring: the tokens of its own recall alone, within the window by position. The ring is set
      aside during the recall and is afterwards as before, so that the most recent tokens stay in it.

    Whatever is fed later sees recalled tokens like any others, except in rings.
    """
    rings = [part for part in leaves(cache) if isinstance(part, PositionedRotatingKVCache)]
    held = [ring.state for ring in rings]
    for ring in rings:
        ring.state = RotatingKVCache(ring.max_size).state, ring.next, []
    try:
        yield
    finally:
        for ring, state in zip(rings, held, strict=True):
            ring.state = state


def fill(cache: list[Any], length: int) -> None:
    """Extend a filled cache to `length` tokens, with room for more. Adds zeros, in full attention only."""
    for part in leaves(cache):
        if type(part) is KVCache and not part.empty():
            part.keys, part.values = (_zeros(array, length + KVCache.step) for array in (part.keys, part.values))
            part.offset = length
    mx.eval([part.state for part in cache])


def _zeros(like: mx.array, length: int) -> mx.array:
    B, H, _, D = like.shape
    return mx.zeros((B, H, length, D), like.dtype)


def is_stateful(cache: Sequence[Any]) -> bool:
    """Return whether some layer's state can't go back to an earlier length."""
    return any(isinstance(part, (ArraysCache, PositionedRotatingKVCache)) for part in leaves(cache))


class Snapshot:
    """A cache before tokens that may be taken back, after any number of forwards."""

    _TRIMMABLE = (KVCache, PositionedKVCache, QuantizedKVCache)

    def __init__(self, cache: Sequence[Any]) -> None:
        self._trimmed = [part for part in leaves(cache) if isinstance(part, self._TRIMMABLE)]
        # Copies share memory with the cache until it is written.
        copied = [part for part in leaves(cache) if not isinstance(part, self._TRIMMABLE)]
        self._restored = [(part, copy.deepcopy(part.state)) for part in copied]

    def take_back(self, count: int, fed: int) -> int:
        """Take back the last `count` of the `fed` tokens, or all of them if a part of the cache can't be trimmed.

        Returns:
            The number of tokens taken back.
        """
        count = fed if self._restored else count
        for part in self._trimmed:
            if not part.empty():
                part.trim(count)
        for part, state in self._restored:
            part.state = copy.deepcopy(state)
        return count


def quantize_kv(cache: Sequence[Any], bits: int) -> tuple[list[Any], int]:
    """Return mlx-lm's quantised KV caches of these plain ones, and the shift that they can't carry.

    Raises:
        SparseUnsupportedError: a window layer or composite, which mlx-lm can't quantise, or heads that are no
            multiple of 32 values.
    """
    shift = next((part.shift for part in leaves(cache) if isinstance(part, Positioned)), 0)
    quantized: list[Any] = []
    for part in cache:
        if isinstance(part, PositionedKVCache):
            part = part.inner
        elif not isinstance(part, (ArraysCache, KVCache)):
            raise SparseUnsupportedError(f"{type(part).__name__} can't be quantised")
        quantized.append(_quantize(part, bits) if type(part) is KVCache else part)
    return quantized, shift


def _quantize(part: KVCache, bits: int) -> QuantizedKVCache:
    sizes = [] if part.keys is None else [part.keys.shape[-1], part.values.shape[-1]]
    for group in _GROUPS:
        if all(size % group == 0 for size in sizes):
            return part.to_quantized(group_size=group, bits=bits)
    raise SparseUnsupportedError(f"heads of {sizes[0]} and {sizes[1]} values can't be quantised: 32 share a scale")
