"""Gives the answers of many short questions about one prompt their probabilities. Nothing is decoded.

Each question is a row of tokens behind the prompt, and the target's distribution behind its last token says how likely
each answer is. Rows share forwards where the target follows explicit positions and has full attention in all layers;
else they are read one after the other. The cache is afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np

from ..adapters.probe import probe_sparse
from ..adapters.registry import adapter_for, architecture_of
from ..arrays import Bools, Floats
from ..cache.positioned import Snapshot
from ..cache.side_by_side import SideBySide
from ..events import Decisions, Progress
from ..loading import ModelPair
from ..request import Question, as_token_ids
from ..sampling import LOGITS_ROWS, log_softmax
from ..specprefill.sparse_prefill import feed, forward_ends
from .active_request import ActiveRequest


class Decider:
    """Reads questions. MLX thread only.

    Args:
        step: returns the tokens of the target's next forward.
    """

    def __init__(self, pair: ModelPair, step: Callable[[], int]) -> None:
        self._pair = pair
        self._step = step

    @cached_property
    def _places_tokens(self) -> bool:
        """Return whether the target follows explicit positions. Without a draft that is checked here."""
        pair = self._pair
        if pair.sparse_refusal is None or pair.ranks is not None:
            return pair.sparse_refusal is None
        adapter = adapter_for(architecture_of(pair.target))
        return adapter.sparse_refusal is None and probe_sparse(pair.target) is None

    def decide(self, active: ActiveRequest) -> Generator[Progress, None, Decisions]:
        """Read the request's questions behind its prompt, which the cache holds; yield between forwards."""
        questions, cache = active.request.questions, active.cache
        shares = self._places_tokens and SideBySide.can_hold(cache)
        read = active.reading.size
        done, total = read, read + sum(question.tokens.size for question in questions)
        found: dict[int, Floats] = {}
        apart = [i for i, question in enumerate(questions) if not (shares and question.differs_at_once)]
        together = sorted({*range(len(questions))} - {*apart})
        for group in _groups(together, lambda i: questions[i].tokens.size, self._step):
            decided = self._together(active, [questions[i] for i in group])
            found |= dict(zip(group, decided, strict=True))
            done += sum(questions[i].tokens.size for i in group)
            yield Progress("prefill", done, total)
        for i in apart:
            found[i] = yield from self._alone(active, questions[i], shares, done, total)
            done += questions[i].tokens.size
        return Decisions(tuple(found[i] for i in range(len(questions))), _kept(active))

    def _together(self, active: ActiveRequest, questions: Sequence[Question]) -> list[Floats]:
        """Return the probabilities of questions that are read in two forwards, of which the second has their last
        tokens: only these meet the output projection.
        """
        rows = [question.tokens for question in questions]
        with SideBySide(active.cache) as side:
            if any(row.size > 1 for row in rows):
                side.read(self._pair.target, [row[:-1] for row in rows], [0] * len(rows))
                side.wait()
            logits = side.read(self._pair.target, [row[-1:] for row in rows], [row.size - 1 for row in rows])
            chosen = [row[mx.array(question.first)] for row, question in zip(logits, questions, strict=True)]
            shares = [mx.softmax(row.astype(mx.float32)) for row in chosen]
            mx.eval(shares)
        return [np.array(row) for row in shares]

    def _alone(
        self, active: ActiveRequest, question: Question, shares: bool, done: int, total: int
    ) -> Generator[Progress, None, Floats]:
        """Read one question, and the labels behind it where their first tokens don't tell them apart."""
        cache, tokens, snapshot, fed = active.cache, question.tokens, Snapshot(active.cache), 0
        logits: mx.array | None = None
        try:
            ends = forward_ends(tokens.size, self._step)
            for fed, logits in feed(self._pair.target, cache, tokens, None, ends, logits=True):  # noqa: B007
                yield Progress("prefill", done + fed, total)
            assert logits is not None
            logprobs = log_softmax(logits)[0, mx.array(question.first)]
            if not question.differs_at_once:
                logprobs = self._whole_labels(cache, question, logprobs, shares)
            return np.array(mx.softmax(logprobs))
        finally:
            snapshot.take_back(fed, fed)

    def _whole_labels(self, cache: list[object], question: Question, first: mx.array, shares: bool) -> mx.array:
        """Return the mean log-probability of each label's tokens behind the question, (L,).

        Args:
            first: of their first tokens.
        """
        totals = list(first)
        longer = [i for i, label in enumerate(question.labels) if len(label) > 1]
        sizes = {i: len(question.labels[i]) - 1 for i in longer}
        for group in _groups(longer, sizes.__getitem__, lambda: LOGITS_ROWS if shares else 1):
            rows = [as_token_ids(question.labels[i][:-1]) for i in group]
            if shares:
                with SideBySide(cache) as side:  # type: ignore[arg-type] # `shares` says so
                    logprobs = log_softmax(side.read(self._pair.target, rows, [0] * len(rows)))
                    mx.eval(logprobs)
            else:
                snapshot = Snapshot(cache)
                logprobs = log_softmax(self._pair.target(mx.array(rows[0])[None], cache=cache)[0])
                mx.eval(logprobs)
                snapshot.take_back(rows[0].size, rows[0].size)
            start = 0
            for i in group:
                following = mx.array(question.labels[i][1:])
                own = logprobs[start : start + sizes[i]]
                totals[i] = totals[i] + mx.take_along_axis(own, following[:, None], axis=1).sum()
                start += sizes[i]
        return mx.stack(totals) / mx.array([len(label) for label in question.labels])


def _groups(members: Sequence[int], size_of: Callable[[int], int], step: Callable[[], int]) -> Iterator[list[int]]:
    """Yield members that are read together: as many as a forward has tokens for, at least one, at most 128."""
    left = list(members)
    while left:
        most, count, used = step(), 0, 0
        while count < min(len(left), LOGITS_ROWS) and (not count or used + size_of(left[count]) <= most):
            used += size_of(left[count])
            count += 1
        yield left[:count]
        left = left[count:]


def _kept(active: ActiveRequest) -> Bools | None:
    """Return for each question whether the place that it looks at is read; None: nobody knows that place."""
    if not active.is_sparse:
        return np.ones(len(active.request.questions), dtype=np.bool_)
    places = active.scored.places
    return np.isin(places, active.kept) if places.size else None
