"""The arrays of a prompt cache: how each layer's are copied out, checked and put back.

Full attention stores token by token, so any range of tokens can be cut out and any prefix rebuilt. Recurrent layers and
rotating windows hold only their latest state, which is valid at exactly one length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ..held import HeldTokens
from ..positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, leaves

Arrays = dict[str, mx.array]
_Kind = Literal["tokens", "window", "recurrent"]


def nbytes_of(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _kind(leaf: Any) -> _Kind | None:
    if type(leaf) in (KVCache, PositionedKVCache):
        return "tokens"
    if type(leaf) in (RotatingKVCache, PositionedRotatingKVCache):
        return "window"
    return "recurrent" if isinstance(leaf, ArraysCache) else None


class Layout:
    """Splits one model's prompt cache into arrays. Array names are `<leaf>.<part>`.

    Attributes:
        refusal: why this model's caches can't be stored exactly; None if they can.
        stateful: some layer can't be trimmed, so a prefix is usable only at a stored state.
    """

    def __init__(self, make_cache: Callable[[], list[Any]]) -> None:
        self._make = make_cache
        parts = list(leaves(make_cache()))
        self._kinds = [_kind(part) for part in parts]
        unknown = sorted({type(part).__name__ for part in parts if _kind(part) is None})
        self.refusal = f"cache type {', '.join(unknown)} can't be stored" if unknown else None
        self.stateful = any(kind != "tokens" for kind in self._kinds)

    def check(self, cache: Sequence[Any], length: int, more: bool = False) -> None:
        """Check that a cache holds `length` tokens densely. Recurrent layers are not checked.

        Args:
            more: accept more tokens.

        Raises:
            ValueError: another number of tokens, gaps between positions, several rows, or another model's cache.
        """
        parts = list(leaves(cache))
        if [_kind(part) for part in parts] != self._kinds:
            raise ValueError("the cache is not of this model")
        counted = False
        for part, kind in zip(parts, self._kinds, strict=True):
            if part.empty():  # some models make caches that no layer uses
                continue
            if kind != "recurrent":
                _check_counts(part, length, more)
            counted = counted or kind != "recurrent" or set(self._kinds) == {"recurrent"}
        if length and not counted:
            raise ValueError(f"the cache is empty and can't hold {length} tokens")

    def delta(self, cache: Sequence[Any], start: int, end: int) -> Arrays:
        """Copy the keys and values in slots [start, end), (1, H, end - start, D) each. The result is not evaluated."""
        arrays: Arrays = {}
        for index, part in self._layers_of(cache, "tokens"):
            # A plain slice would be a view that keeps the whole cache alive.
            arrays[f"{index}.keys"] = mx.contiguous(part.keys[..., start:end, :])
            arrays[f"{index}.values"] = mx.contiguous(part.values[..., start:end, :])
        return arrays

    def state(self, cache: Sequence[Any]) -> Arrays:
        """Copy the state of layers that can't be trimmed. The result is not evaluated."""
        arrays: Arrays = {}
        for index, part in self._layers_of(cache, "recurrent"):
            for slot, array in enumerate(part.cache):
                if array is not None:
                    arrays[f"{index}.{slot}"] = mx.contiguous(array)
        for index, part in self._layers_of(cache, "window"):
            ring = part.inner if isinstance(part, Positioned) else part
            keys, values, write = _compact(ring)
            arrays[f"{index}.keys"], arrays[f"{index}.values"] = mx.contiguous(keys), mx.contiguous(values)
            arrays[f"{index}.write"] = mx.array([write], dtype=mx.int32)
            if isinstance(part, Positioned) and part.shift:
                arrays[f"{index}.positions"] = mx.array(part.held.positions[-keys.shape[2] :])
                arrays[f"{index}.slots"] = mx.array([part.slots], dtype=mx.int32)
        return arrays

    def build(
        self,
        chain: Sequence[Arrays],
        excess: int,
        state: Arrays | None,
        length: int,
        held: HeldTokens,
        room: int = 0,
    ) -> list[Any]:
        """Return a prompt cache for `length` tokens that shares nothing writable with its source arrays.

        Keys and values are not evaluated: the first forward copies them, layer by layer, to its own arrays. A cache
        that no forward reads costs no copy.

        Args:
            chain: deltas from the first token on; the last one may hold more tokens.
            excess: number of tokens to cut from the end.
            state: of the other layers at exactly `length`; None if there are none.
            room: tokens that can be written without another copy.
            held: the tokens.
        """
        cache = self._make()
        for index, (part, kind) in enumerate(zip(leaves(cache), self._kinds, strict=True)):
            if kind == "tokens":
                _restore_tokens(part, index, chain, excess, length, held, room)
            elif state is not None and kind == "recurrent":
                _restore_recurrent(part, index, state)
            elif state is not None and f"{index}.keys" in state:
                _restore_window(part, index, state, length)
        return cache

    def _layers_of(self, cache: Sequence[Any], kind: _Kind) -> list[tuple[int, Any]]:
        parts = zip(leaves(cache), self._kinds, strict=True)
        wanted = [(i, part) for i, (part, its) in enumerate(parts) if its == kind]
        return [(i, part) for i, part in wanted if kind == "recurrent" or not part.empty()]


def _check_counts(part: Any, length: int, more: bool) -> None:
    if isinstance(part, Positioned):
        placed = not isinstance(part.offset, int)
        runs = part.held.runs()
        if placed or part.shift != 0 or len(runs) > 1 or any(estimated for _, _, estimated in runs):
            raise ValueError(f"a sparse cache (next position {part.next}, {part.slots} tokens) is no dense prefix")
        part = part.inner
    if part.offset < length or (part.offset > length and not more):
        raise ValueError(f"the cache holds {part.offset} tokens, not {length}")
    if part.keys.shape[0] != 1:
        raise ValueError(f"the cache holds {part.keys.shape[0]} rows, not one")


def _compact(ring: Any) -> tuple[mx.array, mx.array, int]:
    """Return keys, values and write slot of a ring without unused or expired slots, in storage order.

    After a chunk the ring is longer than its window; the cut is that of its next write. The order is kept: a sum over
    keys in another order rounds differently.
    """
    size = min(ring.offset, ring.keys.shape[2])
    start, write = 0, ring._idx
    if size > ring.max_size and ring.keep == 0:
        start, write = size - ring.max_size, ring.max_size
    return ring.keys[..., start:size, :], ring.values[..., start:size, :], write


def _restore_tokens(
    part: Any,
    index: int,
    chain: Sequence[Arrays],
    excess: int,
    length: int,
    held: HeldTokens,
    room: int,
) -> None:
    names = f"{index}.keys", f"{index}.values"
    if not chain or names[0] not in chain[0]:  # no layer uses it
        return
    spare = -(held.size + room) % KVCache.step + room if room else 0
    keys, values = (_join([arrays[name] for arrays in chain], excess, spare) for name in names)
    inner = keys, values, held.size
    part.state = (inner, length, held.runs()) if isinstance(part, Positioned) else inner


def _join(parts: list[mx.array], excess: int, spare: int) -> mx.array:
    """Concatenate parts (1, H, S, D) without the last `excess` tokens, and with `spare` slots behind them. Not
    evaluated.
    """
    last = parts[-1]
    if excess:
        parts[-1] = last[..., : last.shape[2] - excess, :]
    if spare:
        parts.append(mx.zeros((1, last.shape[1], spare, last.shape[3]), last.dtype))
    return mx.concatenate(parts, axis=2)


def _restore_recurrent(part: Any, index: int, state: Arrays) -> None:
    for slot in range(len(part.cache)):
        stored = state.get(f"{index}.{slot}")
        # In-place assignment would change the array object for every holder.
        part.cache[slot] = None if stored is None else copy.deepcopy(stored)


def _restore_window(part: Any, index: int, state: Arrays, length: int) -> None:
    keys, values = (copy.deepcopy(state[f"{index}.{name}"]) for name in ("keys", "values"))
    ring = part.inner if isinstance(part, Positioned) else part
    sparse = f"{index}.positions" in state
    slots = int(state[f"{index}.slots"]) if sparse else length
    inner = keys, values, slots, ring.keep, ring.max_size, int(state[f"{index}.write"])
    if not isinstance(part, Positioned):
        part.state = inner
        return
    count = min(length, ring.max_size)
    held = (
        HeldTokens.of(np.array(state[f"{index}.positions"])) if sparse else HeldTokens([(length - count, count, False)])
    )
    part.state = inner, length, held.runs()
