"""Scoring by a draft with another tokenizer: converts the prompt to its tokens, and the scores back.

Two tokens overlap if they share a character.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..adapters.text_mapping import TextMapping
from ..arrays import Bools, Floats, Spans
from .asked_lines import Ask
from .scorer import Scores, ScoringInput


@dataclass(frozen=True, slots=True)
class Overlap:
    """A text as the target's M >= 1 tokens and as the draft's N >= 1.

    Attributes:
        target: (M, 2), the characters of each token. Some tokens have none, and several may share one.
        draft: the same, (N, 2).
    """

    target: Spans
    draft: Spans

    def importance(self, found: Floats) -> Floats:
        """Return the importance of the target's tokens, (M,), from the draft's, (N,): the maximum over overlapping
        tokens.

        No value is negative. A token without text has none.
        """
        meets = _overlaps(self.target, self.draft)
        counted = np.append(np.where(_filled(self.draft), found, np.float32(0)), np.float32(0))
        return np.where(_filled(meets), np.maximum.reduceat(counted, meets.ravel())[::2], np.float32(0))

    def mask(self, chosen: Bools) -> Bools:
        """Return a mask of the draft's tokens, (N,), from the target's, (M,): true if all overlapping tokens are
        chosen.

        Also true for tokens without text.
        """
        meets = _overlaps(self.draft, self.target)
        counted = np.append(chosen | ~_filled(self.target), True)
        return np.where(_filled(meets), np.logical_and.reduceat(counted, meets.ravel())[::2], True)

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Return the draft's tokens [start, end) that overlap the target's [start, end), as in `spans`."""
        ((first, stop),) = self.spans(np.array([[start, end]])).tolist()
        return first, stop

    def spans(self, ranges: Spans) -> Spans:
        """Return the draft's tokens [start, end) that overlap each of the target's, at least one, (N, 2) -> (N, 2).

        For target tokens without text it is the last draft token that begins before them.
        """
        stop = np.maximum(np.searchsorted(self.draft[:, 0], self.target[ranges[:, 1] - 1, 1], side="left"), 1)
        first = np.searchsorted(self.draft[:, 1], self.target[ranges[:, 0], 0], side="right")
        return np.stack([np.minimum(first, stop - 1), stop], axis=1)


def _filled(ranges: Spans) -> Bools:
    return ranges[:, 0] < ranges[:, 1]


def _overlaps(spans: Spans, others: Spans) -> Spans:
    """Return for every token the others [first, stop) that it overlaps; empty for a token without text.

    Raveled it suits `reduceat`, of whose results every second one counts.
    """
    first = np.searchsorted(others[:, 1], spans[:, 0], side="right")
    stop = np.searchsorted(others[:, 0], spans[:, 1], side="left")
    return np.stack([first, np.where(_filled(spans), np.maximum(first, stop), first)], axis=1)


@dataclass(frozen=True)
class MappedTask:
    """A scoring task in the draft's tokens, and the way back.

    Attributes:
        lines: the target's tokens of each of the task's lines.
    """

    task: ScoringInput
    overlap: Overlap
    lines: Spans

    def scores(self, found: Scores) -> Scores:
        """Convert scores to the target's tokens. Drops the draft's look-ahead and cache, which the target can't use."""
        N = found.importance.size
        known = int(np.searchsorted(self.overlap.target[:, 1], self.overlap.draft[N - 1, 1], side="right"))
        importance = self.overlap.importance(np.pad(found.importance, (0, len(self.overlap.draft) - N)))[:known]
        words = f"{found.words}, mapped by text"
        ends = self.overlap.draft[found.places, 1]
        places = np.searchsorted(self.overlap.target[:, 1], ends, side="left").astype(np.int32)
        mapped = replace(found, importance=importance, scorer="mapped-draft", words=words, lookahead=(), cache=[])
        asks = tuple(self._target_ask(ask) for ask in found.asks)
        return replace(mapped, places=places, asks=asks)

    def _target_ask(self, ask: Ask) -> Ask:
        start, end = self.lines[ask.line].tolist()
        return ask._replace(start=start, end=end)


def map_task(mapping: TextMapping, task: ScoringInput) -> MappedTask:
    """Convert a task to the draft's tokens.

    Raises:
        SparseUnsupportedError: the prompt has no text.
    """
    text = mapping.read(task.prompt)
    overlap = Overlap(text.target_spans, text.draft_spans)
    template = overlap.mask(task.template)
    template[0] = True  # a sink, whatever the target's first token is
    stops = frozenset(int(token) for token in mapping.tokenizer.eos_token_ids)
    question = overlap.span(*task.question)
    none = np.zeros(0, dtype=np.int32)  # the draft has other ids for the question
    lines, asked = task.lines, tuple(mapping.read(q).tokens for q in task.questions)
    task = replace(task, again=none, lines=overlap.spans(lines), questions=asked)
    task = replace(task, prompt=text.tokens, question=question, template=template, stop_ids=stops)
    return MappedTask(task, overlap, lines)
