"""The tokens of a prompt that a cache holds, and how each of them was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Bools, Indices, Positions

Run = tuple[int, int, bool]  # the first position, the number of tokens, and whether they are estimated


class HeldTokens:
    """Positions in the order of feeding, as maximal runs. No position occurs twice.

    A token is *read*, computed by the model behind what the cache held by then, or *estimated*: keys and values that
    were read behind other text, or that a map made of the draft's states, stand in for its own. Any other token is
    *absent*. A position that is smaller than an earlier one was recalled, for the sake of the next one that is not. A
    prompt kept in chunks is a short list.

    Attributes:
        size: tokens.
    """

    __slots__ = ("_index", "_runs", "size")

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self._runs = [list(run) for run in runs]
        self._index: tuple[Positions, Positions, Positions] | None = None
        self.size = sum(count for _, count, _ in runs)

    @classmethod
    def all(cls, length: int) -> HeldTokens:
        """Return the first `length` tokens, all of them read."""
        return cls([(0, length, False)] if length else [])

    @classmethod
    def of(cls, marked: Positions) -> HeldTokens:
        """Return the tokens of marked positions."""
        held = cls()
        held.extend(marked)
        return held

    def runs(self) -> list[Run]:
        return [(start, count, bool(estimated)) for start, count, estimated in self._runs]

    @property
    def contiguous(self) -> bool:
        """Return whether the positions are one run of one kind."""
        return len(self._runs) <= 1

    @property
    def end(self) -> int:
        """Return the position after the last token fed; 0 if empty."""
        return self._runs[-1][0] + self._runs[-1][1] if self._runs else 0

    @property
    def dense(self) -> int:
        """Return the number of tokens from the prompt's first one on that were read one behind the other."""
        start, count, estimated = self._runs[0] if self._runs else (0, 0, False)
        return 0 if start or estimated else count

    @property
    def positions(self) -> Positions:
        """Return all positions in the order of feeding, int32 (N,)."""
        return self._indexed()[0]

    @property
    def read(self) -> Positions:
        """Return the positions of tokens that were read, in the order of feeding, int32."""
        marked = self.marked
        return marked[marked >= 0]

    @property
    def marked(self) -> Positions:
        """Return the positions in the order of feeding, where an estimated one is marked: `~position`, below 0."""
        marks = [np.full(count, -int(estimated), dtype=np.int32) for _, count, estimated in self._runs]
        marked: Positions = self.positions ^ np.concatenate([self.positions[:0], *marks])
        return marked

    def _indexed(self) -> tuple[Positions, Positions, Positions]:
        """Return all positions; the slots of those that were not recalled, and their positions."""
        if self._index is None:
            none = np.zeros(0, dtype=np.int32)
            parts = (np.arange(start, start + count, dtype=np.int32) for start, count, _ in self._runs)
            positions = np.concatenate([none, *parts])
            highest = np.maximum.accumulate(positions)
            slots = np.flatnonzero(np.append(np.int32(-1), highest[:-1]) < positions) if positions.size else none
            self._index = positions, slots.astype(np.int32), positions[slots]
        return self._index

    def append(self, start: int, count: int, estimated: bool = False) -> None:
        if count <= 0:
            return
        self._index = None
        if self._runs and start == self.end and self._runs[-1][2] == estimated:
            self._runs[-1][1] += count
        else:
            self._runs.append([start, count, estimated])
        self.size += count

    def extend(self, marked: Positions) -> None:
        """Append positions in the order of feeding, marked as in `marked`."""
        if marked.size == 0:
            return
        estimated, positions = marked < 0, np.where(marked < 0, ~marked, marked)
        cuts = np.flatnonzero((np.diff(positions) != 1) | np.diff(estimated)) + 1
        for start, end in zip([0, *cuts.tolist()], [*cuts.tolist(), marked.size], strict=True):
            self.append(int(positions[start]), end - start, bool(estimated[start]))

    def holds(self, positions: Positions) -> Bools:
        """Return which of these positions are held."""
        held: Bools = np.isin(positions, self.positions)
        return held

    def read_again(self, positions: Positions) -> Indices:
        """Mark tokens as read, those that are absent behind all others. Return the slot of each of them."""
        marked = np.concatenate([self.marked, positions[~self.holds(positions)]])
        every = np.where(marked < 0, ~marked, marked)
        order = np.argsort(every)
        slots = order[np.searchsorted(every, positions, sorter=order)]
        marked[slots] = positions
        changed = HeldTokens.of(marked)
        self._runs, self._index, self.size = changed._runs, None, changed.size
        return slots.astype(np.int32)

    def keep_last(self, count: int) -> None:
        """Drop all but the last `count` positions."""
        excess, self._index = self.size - count, None
        while excess > 0:
            run = self._runs[0]
            cut = min(excess, run[1])
            run[0] += cut
            run[1] -= cut
            self.size -= cut
            excess -= cut
            if run[1] == 0:
                self._runs.pop(0)

    def drop_from(self, position: int) -> int:
        """Drop the first position >= `position` and all fed after it; return their number."""
        before, self._index = self.size, None
        first = next((i for i, (start, count, _) in enumerate(self._runs) if start + count > position), len(self._runs))
        dropped = self._runs[first:]
        del self._runs[first:]
        self.size -= sum(count for _, count, _ in dropped)
        if dropped:
            start, _, estimated = dropped[0]
            self.append(start, position - start, bool(estimated))
        return before - self.size

    def slots(self, length: int) -> int:
        """Return the number of tokens fed when the cache covered the prompt's first `length` tokens."""
        _, slots, ends = self._indexed()
        count = int(np.searchsorted(ends, length))
        return int(slots[count - 1]) + 1 if count else 0

    def within(self, start: int, end: int) -> Positions | None:
        """Return the positions of a block [start, end), as in `marked`. None if all up to its end is dense."""
        if end <= self.dense:
            return None
        return self.marked[self.slots(start) : self.slots(end)]
