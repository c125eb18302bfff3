"""Scoring by a draft with another tokenizer: converts the prompt to its tokens, and the scores back.

Every byte of the text lies in one token on either side, so the ends of its tokens define a side. Two tokens overlap if
they share a byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..adapters.text_mapping import TextMapping
from ..arrays import Bools, Ends, Floats
from .scorer import Scores, ScoringInput


@dataclass(frozen=True, slots=True)
class Overlap:
    """A text of B >= 1 bytes as the target's M tokens and as the draft's N.

    Attributes:
        target: int64 (M,), bytes of the text up to each token's end: ascending from 0 or more to B. A token that ends
            where the one before it ends has no text.
        draft: the same, (N,).
    """

    target: Ends
    draft: Ends

    def __post_init__(self) -> None:
        for ends in (self.target, self.draft):
            if ends.size == 0 or ends[0] < 0 or (np.diff(ends) < 0).any():
                raise ValueError("the ends of tokens must ascend")
        if self.target[-1] != self.draft[-1] or self.draft[-1] < 1:
            raise ValueError(f"the texts have {self.target[-1]} and {self.draft[-1]} bytes")

    def importance(self, found: Floats) -> Floats:
        """Return the importance of the target's tokens, (M,), from the draft's, (N,): the maximum over overlapping
        tokens.

        No value is negative. A token without text takes the larger value of its two neighbours.
        """
        first, stop = _overlaps(self.target, self.draft)
        has_text = stop > first
        counted = np.where(_has_text(self.draft), found, np.float32(0))
        highest = np.maximum.reduceat(np.append(counted, np.float32(0)), _pairs(first, stop))[::2]
        return _from_neighbours(np.where(has_text, highest, np.float32(0)), has_text)

    def mask(self, chosen: Bools) -> Bools:
        """Return a mask of the draft's tokens, (N,), from the target's, (M,): true if all overlapping tokens are
        chosen.

        Also true for tokens without text.
        """
        first, stop = _overlaps(self.draft, self.target)
        counted = np.append(chosen | ~_has_text(self.target), True)
        every = np.logical_and.reduceat(counted, _pairs(first, stop))[::2]
        return np.asarray(every | (stop == first), dtype=np.bool_)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the draft's tokens [start, end) that overlap the target's [start, end), at least one.

        For target tokens without text it is the last draft token that begins before them.
        """
        text = int(self.target[start - 1]) if start > 0 else 0, int(self.target[end - 1])
        stop = int(np.searchsorted(self.draft, text[1], side="left")) + 1
        first = int(np.searchsorted(self.draft, text[0], side="right"))
        return min(first, stop - 1), stop


def _has_text(ends: Ends) -> Bools:
    return np.diff(ends, prepend=0) > 0


def _overlaps(ends: Ends, others: Ends) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return for every token the others [first, stop) that it overlaps; empty for a token without text."""
    starts = np.append(0, ends[:-1])
    first = np.searchsorted(others, starts, side="right")
    return first, np.where(_has_text(ends), np.searchsorted(others, ends, side="left") + 1, first)


def _pairs(first: npt.NDArray[np.intp], stop: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Interleave ranges for `reduceat`, of whose results every second one counts."""
    return np.stack([first, stop], axis=1).ravel()


def _from_neighbours(values: Floats, known: Bools) -> Floats:
    """Fill unknown values with the larger of the nearest known ones before and after."""
    if known.all():
        return values
    index, size = np.arange(values.size), values.size
    before = np.maximum.accumulate(np.where(known, index, -1))
    after = np.minimum.accumulate(np.where(known, index, size)[::-1])[::-1]
    around = np.append(values, np.float32(0))  # -1 and `size` index its last element: no neighbour
    return np.where(known, values, np.maximum(around[before], around[after]))


@dataclass(frozen=True)
class MappedTask:
    """A scoring task in the draft's tokens, and the way back."""

    task: ScoringInput
    overlap: Overlap

    def scores(self, found: Scores) -> Scores:
        """Convert scores to the target's tokens. Drops the draft's look-ahead and cache, which the target can't use."""
        N = found.importance.size
        known = int(np.searchsorted(self.overlap.target, self.overlap.draft[N - 1], side="right"))
        importance = self.overlap.importance(np.pad(found.importance, (0, self.overlap.draft.size - N)))[:known]
        words = f"{found.words}, mapped by text"
        return replace(found, importance=importance, scorer="mapped-draft", words=words, lookahead=(), cache=[])


def map_task(mapping: TextMapping, task: ScoringInput) -> MappedTask:
    """Convert a task to the draft's tokens.

    Raises:
        SparseUnsupportedError: the prompt has no text.
    """
    text = mapping.read(task.prompt)
    overlap = Overlap(text.target_ends, text.draft_ends)
    template = overlap.mask(task.template)
    template[0] = True  # a sink, whatever the target's first token is
    stops = frozenset(int(token) for token in mapping.tokenizer.eos_token_ids)
    question = overlap.span(*task.question)
    none = np.zeros(0, dtype=np.int32)  # the draft has other ids for the question
    asks = tuple(ask._replace(start=start, end=end) for ask in task.asks for start, end in [overlap.span(*ask[:2])])
    task = replace(task, again=none, asks=asks)
    return MappedTask(replace(task, prompt=text.tokens, question=question, template=template, stop_ids=stops), overlap)
