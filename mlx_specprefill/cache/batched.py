"""Batches of positioned caches, whose rows join and leave at any step.

The protocol is that of mlx-lm's batch caches: merge, extend, filter, extract. Keys and values of all rows lie in one
array, right-justified on a common write slot. Each row's token slots and count stay on the host. A step feeds one token
per row.

Joining and leaving cost one row's copy: a new row is written into a spare one, and the last row takes the place of one
that leaves. Without a spare row, or with too much idle space, all rows are copied. `make_room` and `compact` do that
for one layer at a time between two steps, so that no step waits for all layers. MLX writes in place only into an array
with no other user. An unevaluated array computed from it is a user: evaluate extracted rows before `filter`, or
everything is copied.

Without a window a row sees all of its tokens. Where stored order is position order, a window covers the last few
tokens. A mask is therefore one number per row: the number of recent slots that are visible. Only a window over a full
cache with recalled tokens needs a mask by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, _BaseCache

from ..arrays import Positions
from .held import HeldTokens
from .positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache

_Part = tuple[Sequence[mx.array], int]  # stored arrays of B rows, each (B, H, S, ...), and B; empty: no tokens
_STEP = 256  # slots added at a time, averaged over layers, as in mlx-lm
# Idle bytes of one batch, all layers, that are accepted to save copies. That is a few rows of small models, whose
# forwards are faster than a copy of their caches. It is less than a row of large models, whose copies are cheap next to
# a forward.
_IDLE_BYTES = 512 << 20


@dataclass(eq=False)
class BatchRow:
    """Slots of one row's tokens: those it joined with, and one more per step since."""

    held: HeldTokens  # positions of its stored tokens when it joined
    slots: int  # number of tokens fed before it joined
    start: int  # position of the first token after joining
    joined_at: int = 0  # step of the batch

    @cached_property
    def positions(self) -> Positions:
        """Return the positions of the tokens that it joined with, in the order of feeding."""
        return self.held.positions

    @cached_property
    def ascends(self) -> bool:
        """Return whether these tokens were fed in order of position, without recalls."""
        return bool((np.diff(self.positions) > 0).all())


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


def stack_rows(parts: Sequence[_Part], spare: int, size: int, room: int) -> list[mx.array]:
    """Stack arrays (B_i, H, S_i, D) into (sum of B_i + spare, H, size + room, D), aligned so that all end at slot
    `size`.
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


class PositionedBatch(_BaseCache):  # type: ignore[misc]
    """Keys and values (C, H, S, D) of up to C rows, written at one slot for all. A ring once S has reached `max_size`.

    Unused slots in front of a row's tokens are zero: old contents (infinity, for example) would show through a mask.

    Attributes:
        arrays: keys and values as stored, each (C, H, S, ...); empty before the first token.
        part: index of this cache in the batch, and the number of caches. They share the idle
            bytes, and grow in different steps: a step that copies all of them is long.
        most_idle: bytes of the whole batch that may lie idle.
    """

    def __init__(self, max_size: int | None = None) -> None:
        self.max_size = max_size
        self.arrays: list[mx.array] = []
        self.part = (0, 1)
        self.most_idle = _IDLE_BYTES
        self._first = 0  # unused slots in front of all rows; always 0 in a ring
        self._write = 0  # slot of the next token
        self._wrapped = False
        self._steps = 0
        self._rows: list[BatchRow] = []
        self._offset: mx.array | None = None

    # --- for models --------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> mx.array:
        """Return the position of each row's next token, (B,) int32."""
        if self._offset is None:
            self._offset = mx.array([self._next(row) for row in self._rows], dtype=mx.int32)
        return self._offset

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (B, 1, 1, S) over the slots that the next token will fetch; None if every row sees all
        of them.
        """
        self._one_token(N)
        slot, end = self._next_slot()
        size = end - self._first
        if window_size is not None and not all(row.ascends for row in self._rows):
            return self._mask_by_position(window_size, size)
        visible = [self._visible(row, window_size, size) for row in self._rows]
        if all(count == size for count in visible):
            return None
        ages = (slot - self._first - mx.arange(size)) % size
        return ages < mx.array(visible)[:, None, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store one token per row and return all keys and values. Arguments: (B, H, 1, D)."""
        self._one_token(keys.shape[2])
        new = self._as_stored(keys, values)
        if not self.arrays or self._next_slot()[1] > self.arrays[0].shape[2]:
            self._grow(new)
        slot, _ = self._next_slot()
        self._wrapped = self._wrapped or slot < self._write
        rows = len(self._rows)
        for array, token in zip(self.arrays, new, strict=True):
            array[:rows, :, slot : slot + 1] = token
        self._write = slot + 1
        self._steps += 1
        self._offset = None
        return self.keys_and_values()

    @staticmethod
    def _one_token(count: int) -> None:
        if count != 1:
            raise ValueError(f"rows of a batch are fed one token each, not {count}")

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return keys and values of all slots in use, (B, H, S, D), in storage order."""
        rows, slots = slice(len(self._rows)), slice(self._first, self._end)
        return self._halves([array[rows, :, slots] for array in self.arrays])

    def _as_stored(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        """Return tokens in the form of `arrays`."""
        return keys, values

    def _halves(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        """Return keys and values of stored arrays in the form that attention takes."""
        keys, values = arrays
        return keys, values

    @property
    def _end(self) -> int:
        """Return the slot after the last one in use."""
        if not self._wrapped:
            return self._write
        assert self.max_size is not None
        return self.max_size

    def _next_slot(self) -> tuple[int, int]:
        """Return the slot of the next token, and the end of the slots then in use."""
        if self._wrapped:
            assert self.max_size is not None
            return self._write % self.max_size, self.max_size
        if self._write == self.max_size:
            return 0, self.max_size
        return self._write, self._write + 1

    def _grow(self, new: Sequence[mx.array]) -> None:
        """Make room for tokens of this shape."""
        count = len(self._rows)
        if not self.arrays:
            self._lay([([array[:, :, :0] for array in new], count)], 0)
        else:
            used = self._used_slots()
            self._lay([(self._in_order(slice(count)), count)], used, *self._spare(count, used))

    # --- rows --------------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PositionedBatch:
        """Return a batch of single rows. The rows stay unchanged."""
        batch = cls._like(caches[0])
        batch._rows = [batch._joining(cache) for cache in caches]
        parts = [(last_tokens(cache, row.held.size), 1) for cache, row in zip(caches, batch._rows, strict=True)]
        batch._lay(parts, max(row.held.size for row in batch._rows))
        return batch

    @classmethod
    def _like(cls, cache: Any) -> PositionedBatch:
        """Return an empty batch for rows like this one."""
        return cls(cache.max_size if isinstance(cache, PositionedRotatingKVCache) else None)

    def _joining(self, cache: Any) -> BatchRow:
        held = HeldTokens(cache.held.runs())
        if self.max_size is not None:
            held.keep_last(self.max_size)
        return BatchRow(held, cache.slots, cache.next)

    def extend(self, other: PositionedBatch) -> None:
        """Add the rows of `other` after these."""
        count, more = len(self._rows), len(other._rows)
        theirs = other._in_order(slice(more))
        if not self.arrays:
            self._lay([((), count), (theirs, more)], other._used_slots())
        else:
            if not self.fits(more, other._used_slots()):
                self.make_room(more, other._used_slots())
            self._place(count, more, theirs)
        later = self._steps - other._steps
        self._rows += [replace(row, joined_at=row.joined_at + later) for row in other._rows]
        self._first = self._unused_slots(self._rows)
        self._offset = None

    def filter(self, batch_indices: Sequence[int], lifted: Sequence[mx.array] | None = None) -> None:
        """Keep these rows only, in this order.

        Works in place if each of them stays or takes the place of one that leaves.

        Args:
            lifted: the result of `lift` for them, evaluated.
        """
        keep = list(batch_indices)
        if not self.arrays:
            self._rows = [self._rows[index] for index in keep]
        elif (moves := self._moves(keep)) is None:
            self._compact(keep)
        else:
            if lifted is None:
                lifted = self.lift(keep)
                mx.eval(lifted)
            targets = ((to, array) for to, _ in moves for array in self.arrays)
            for (to, array), row in zip(targets, lifted, strict=True):
                array[to : to + 1, :, : self._end] = row
            self._rows = [self._rows[index] for index in keep]
            self._first = self._unused_slots(self._rows)
        self._offset = None

    def lift(self, keep: Sequence[int]) -> list[mx.array]:
        """Copy all arrays of the rows that `filter` will move. The result is not evaluated."""
        moves = self._moves(keep) if self.arrays else None
        return [mx.contiguous(array[row : row + 1, :, : self._end]) for _, row in moves or () for array in self.arrays]

    def _moves(self, keep: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return rows to move as (to, from); None if copying the remaining rows is cheaper."""
        moves = [(to, row) for to, row in enumerate(keep) if row != to]
        return None if any(row < len(keep) for _, row in moves) or 2 * len(moves) > len(keep) else moves

    @property
    def row_bytes(self) -> list[int]:
        """Return the bytes of each row's tokens."""
        return [self._slot_bytes * self._stored_tokens(row) for row in self._rows]

    @property
    def padding(self) -> int:
        """Return the bytes beside the rows' tokens and their room to grow. A row of a ring has room for all of it."""
        if not self.arrays:
            return 0
        count, slots = len(self._rows), self.arrays[0].shape[2]
        room = count * (slots - self._end)
        used = count * slots if self.max_size is not None else sum(map(self._stored_tokens, self._rows)) + room
        return self.nbytes - self._slot_bytes * used

    @property
    def _slot_bytes(self) -> int:
        """Return the bytes of one row's token; 0 before the first."""
        if not self.arrays:
            return 0
        capacity, _, slots, _ = self.arrays[0].shape
        return self.nbytes // (capacity * slots)

    @property
    def oversized(self) -> bool:
        """Return whether too much space is idle. `compact` frees it."""
        if not self.arrays:
            return False
        needed = len(self._rows) * (self.arrays[0].shape[2] - self._first)
        idle = self.nbytes - self._slot_bytes * needed
        return idle > min(self._idle_bytes, self.nbytes // 2)

    def compact(self) -> None:
        """Copy the rows to arrays without idle space."""
        self._compact(range(len(self._rows)))

    def fits(self, rows: int, slots: int) -> bool:
        """Return whether `rows` new rows of at most `slots` tokens fit into spare rows of `extend`."""
        return not self.arrays or (len(self._rows) + rows <= self.arrays[0].shape[0] and slots <= self._end)

    def make_room(self, rows: int, slots: int) -> None:
        """Copy the rows to arrays with room for new ones."""
        count, used = len(self._rows), max(self._used_slots(), slots)
        spare, front = self._spare(count + rows, used)
        self._lay([(self._in_order(slice(count)), count)], used, rows + spare, front)
        self._first = self._unused_slots(self._rows)

    def _compact(self, keep: Sequence[int]) -> None:
        self._rows = [self._rows[index] for index in keep]
        unused = 0 if self._wrapped else self._write - self._longest(self._rows)
        rows = mx.array(list(keep), dtype=mx.int32)
        self.arrays = [array[..., unused:, :][rows] for array in self.arrays]
        self._write -= unused
        self._first = 0

    def extract(self, idx: int) -> Any:
        """Return the row as a single cache. In float32 it equals the cache of a row that was decoded alone."""
        row = self._rows[idx]
        generated = self._steps - row.joined_at
        cache = PositionedKVCache() if self.max_size is None else PositionedRotatingKVCache(self.max_size)
        cache.held = HeldTokens(row.held.runs())
        cache.held.append(row.start, generated)
        cache.next = row.start + generated
        if self.max_size is not None:
            cache.held.keep_last(self.max_size)
        count = cache.held.size
        arrays = self._copy_tail(idx, count)
        if arrays and self.max_size is None:
            cache.inner.state = *arrays, count
        elif arrays:
            cache.inner.state = *arrays, row.slots + generated, 0, self.max_size, count
        return cache

    def _copy_tail(self, idx: int, count: int) -> list[mx.array]:
        """Copy the last `count` tokens of one row. Plain slices would keep the whole batch alive."""
        arrays = self._in_order(slice(idx, idx + 1))
        return [mx.contiguous(array[..., array.shape[2] - count :, :]) for array in arrays]

    def _next(self, row: BatchRow) -> int:
        return row.start + self._steps - row.joined_at

    def _stored_tokens(self, row: BatchRow) -> int:
        count = row.held.size + self._steps - row.joined_at
        return count if self.max_size is None else min(count, self.max_size)

    def _longest(self, rows: Sequence[BatchRow]) -> int:
        return max((self._stored_tokens(row) for row in rows), default=0)

    def _unused_slots(self, rows: Sequence[BatchRow]) -> int:
        """Return the number of slots in front that none of these rows uses."""
        return self._write - self._longest(rows) if self.max_size is None else 0

    def _used_slots(self) -> int:
        """Return the number of slots in use."""
        return self._end - self._first

    def _visible(self, row: BatchRow, window: int | None, size: int) -> int:
        """Return the number of last tokens that the row's next token sees, itself included."""
        held = min(self._stored_tokens(row) + 1, size)
        if self.max_size is not None:  # a dense ring holds no more, whatever the window
            window = min(window or self.max_size, self.max_size)
        if window is None:
            return held
        own = self._steps - row.joined_at + 1  # since it joined, with the next one: these have no gaps
        if own >= window:
            return window
        before = int(row.positions.searchsorted(np.int32(row.start + own - window)))
        return min(held, own + row.held.size - before)

    def _mask_by_position(self, window: int, size: int) -> mx.array | None:
        shown = np.zeros((len(self._rows), size), dtype=bool)
        for seen, row in zip(shown, self._rows, strict=True):
            positions = np.concatenate([row.positions, np.arange(row.start, self._next(row) + 1)])
            seen[size - positions.size :] = positions > positions[-1] - window
        return None if shown.all() else mx.array(shown)[:, None, None]

    def _in_order(self, rows: slice) -> list[mx.array]:
        """Return the arrays of some rows, oldest slot first, without unused slots."""
        arrays = [array[rows, :, self._first : self._end] for array in self.arrays]
        return [mx.roll(array, -self._write, 2) for array in arrays] if self._wrapped else arrays

    # --- storage -----------------------------------------------------------------------------------------------------

    @property
    def _idle_bytes(self) -> int:
        return min(self.most_idle, _IDLE_BYTES) // self.part[1]

    def _place(self, first: int, count: int, arrays: Sequence[mx.array]) -> None:
        """Write `count` rows with all of their slots into spare ones from `first` on."""
        for index, array in enumerate(self.arrays):
            _, H, _, D = array.shape
            new = arrays[index] if arrays else mx.zeros((count, H, 0, D), array.dtype)
            new = mx.pad(new, [(0, 0), (0, 0), (self._end - new.shape[2], 0), (0, 0)])
            array[first : first + count, :, : self._end] = mx.roll(new, self._write, 2) if self._wrapped else new

    def _lay(self, parts: Sequence[_Part], size: int, spare: int = 0, front: int = 0) -> None:
        """Set `arrays` to copies of `parts`: `front` unused slots, `size` slots, and `spare` rows."""
        index, count = self.part
        room = max(1, _STEP // 2 + _STEP * index // count)
        if self.max_size is not None:
            room = min(room, self.max_size - size)
        size += front
        self.arrays = stack_rows(parts, spare, size, room)
        self._first, self._write, self._wrapped = front, size, False

    def _spare(self, rows: int, slots: int) -> tuple[int, int]:
        """Return the spare rows and front slots to keep: for new rows, and for one longer than the others.

        A growing batch is then copied a few times, not once per new row. Both take half of the accepted idle bytes; the
        other half is for rows that leave.
        """
        if not self.arrays:
            return 0, 0
        budget = self._idle_bytes // 4 // self._slot_bytes
        spare = min(rows // 3, budget // max(slots, 1))
        return spare, 0 if self.max_size is not None else min(slots // 8, budget // (rows + spare))

    # --- the rest of the protocol ------------------------------------------------------------------------------------

    @property
    def keys(self) -> Any:
        return self.state[0]

    @keys.setter
    def keys(self, value: Any) -> None:  # some models tie other work to them, or empty unused values
        self.arrays[: len(self.arrays) // 2] = [value] if isinstance(value, mx.array) else value

    @property
    def values(self) -> Any:
        return self.state[1]

    @values.setter
    def values(self, value: Any) -> None:
        self.arrays[len(self.arrays) // 2 :] = [value] if isinstance(value, mx.array) else value

    @property
    def state(self) -> tuple[Any, Any]:
        return self._halves(self.arrays) if self.arrays else (None, None)

    def size(self) -> int:
        return self._used_slots()

    def empty(self) -> bool:
        return not self.arrays

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.arrays)


class QuantizedBatchKVCache(PositionedBatch):
    """Full attention, for mlx-lm's `QuantizedKVCache` rows with equal bits and group size.

    Keys and values are triples, as in those rows: packed values (C, H, S, D * bits / 32) uint32, scales and biases (C,
    H, S, D / group_size). A row joins and leaves with its own triples; only new tokens are quantised. As in those rows,
    `offset` counts slots: the caller adds the rows' shifts (`adjust_offsets`).

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
        return BatchRow(HeldTokens.all(count), count, count)

    def _as_stored(self, keys: mx.array, values: mx.array) -> Sequence[mx.array]:
        return [part for array in (keys, values) for part in mx.quantize(array, self.group_size, self.bits)]

    def _halves(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        half = len(arrays) // 2
        return tuple(arrays[:half]), tuple(arrays[half:])

    def extract(self, idx: int) -> QuantizedKVCache:
        cache = QuantizedKVCache(self.group_size, self.bits)
        cache.offset = self._stored_tokens(self._rows[idx])
        if arrays := self._copy_tail(idx, cache.offset):
            cache.keys, cache.values = self._halves(arrays)
        return cache
