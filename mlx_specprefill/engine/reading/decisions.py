"""Gives the answers of many short questions about one prompt their probabilities. Nothing is decoded.

Each question is a row of tokens behind the prompt, and the target's distribution behind its last token says how likely
each answer is. Rows share forwards where the target follows explicit positions and has full attention in all layers;
else they are read one after the other. The cache is afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ...adapters.registry import adapter_for, architecture_of
from ...adapters.startup_checks import probe_sparse
from ...arrays import Bools, Floats, Indices
from ...cache.feeding import feed, forward_ends
from ...cache.positioned import Snapshot
from ...cache.side_by_side import SideBySide
from ...choosing.sampling import LOGITS_ROWS, log_softmax
from ...events import Decisions, Progress
from ...pair import ModelPair
from ...request import QUESTIONS_AT_ONCE, Question, TokenIds, as_token_ids
from ..requests.active_request import ActiveRequest


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
        for group in _groups(together, [question.tokens.size for question in questions], QUESTIONS_AT_ONCE):
            decided = yield from self._together(cache, [questions[i] for i in group], done, total)
            found |= dict(zip(group, decided, strict=True))
            done += sum(questions[i].tokens.size for i in group)
        for i in apart:
            found[i] = yield from self._alone(cache, questions[i], shares, done, total)
            done += questions[i].tokens.size
        return Decisions(tuple(found[i] for i in range(len(questions))), _kept(active))

    def _together(
        self, cache: list[Any], questions: Sequence[Question], done: int, total: int
    ) -> Generator[Progress, None, list[Floats]]:
        """Return the probabilities of questions that share forwards. The last one has their last tokens: only these
        meet the output projection.
        """
        rows = [question.tokens for question in questions]
        ends = np.array([row.size - 1 for row in rows], dtype=np.int32)
        tokens, numbers, places = _flat([row[:-1] for row in rows])
        with SideBySide(cache) as side:
            start = 0
            while start < tokens.size:
                part = slice(start, start + self._step())
                side.read(self._pair.target, tokens[part], numbers[part], places[part])
                side.wait()
                start = min(part.stop, tokens.size)
                yield Progress("prefill", done + start, total)
            last = np.concatenate([row[-1:] for row in rows])
            logits = side.read(self._pair.target, last, np.arange(len(rows), dtype=np.int32), ends)
            chosen = [row[mx.array(question.first)] for row, question in zip(logits, questions, strict=True)]
            shares = [mx.softmax(row.astype(mx.float32)) for row in chosen]
            mx.eval(shares)
        yield Progress("prefill", done + tokens.size + len(rows), total)
        return [np.array(row) for row in shares]

    def _alone(
        self, cache: list[Any], question: Question, shares: bool, done: int, total: int
    ) -> Generator[Progress, None, Floats]:
        """Read one question, and the labels behind it where their first tokens don't tell them apart."""
        tokens, snapshot, fed = question.tokens, Snapshot(cache), 0
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

    def _whole_labels(self, cache: list[Any], question: Question, first: mx.array, shares: bool) -> mx.array:
        """Return the mean log-probability of each label's tokens behind the question, (L,).

        Args:
            first: of their first tokens.
        """
        totals = list(first)
        longer = [i for i, label in enumerate(question.labels) if len(label) > 1]
        sizes = [len(label) - 1 for label in question.labels]
        for group in _groups(longer, sizes, LOGITS_ROWS if shares else 1):
            tokens, numbers, places = _flat([as_token_ids(question.labels[i][:-1]) for i in group])
            if shares:
                with SideBySide(cache) as side:
                    logprobs = log_softmax(side.read(self._pair.target, tokens, numbers, places))
                    mx.eval(logprobs)
            else:
                snapshot = Snapshot(cache)
                logprobs = log_softmax(self._pair.target(mx.array(tokens)[None], cache=cache)[0])
                mx.eval(logprobs)
                snapshot.take_back(tokens.size, tokens.size)
            following = mx.array([token for i in group for token in question.labels[i][1:]])
            own = mx.take_along_axis(logprobs, following[:, None], axis=1)[:, 0]
            for row, i in enumerate(group):
                totals[i] = totals[i] + mx.where(mx.array(numbers == row), own, 0).sum()
        return mx.stack(totals) / mx.array([len(label) for label in question.labels])


def _flat(rows: Sequence[TokenIds]) -> tuple[TokenIds, Indices, Indices]:
    """Return the tokens of all rows, and for each its row and its place in that."""
    sizes = [row.size for row in rows]
    places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    return np.concatenate(rows), np.repeat(np.arange(len(rows), dtype=np.int32), sizes), places


def _groups(members: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield members that are held together: of so many tokens, at least one, at most 128."""
    group: list[int] = []
    for member in members:
        if group and (len(group) == LOGITS_ROWS or sum(sizes[i] for i in group) + sizes[member] > most):
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _kept(active: ActiveRequest) -> Bools | None:
    """Return for each question whether the place that it looks at is read; None: nobody knows that place."""
    if not active.is_sparse:
        return np.ones(len(active.request.questions), dtype=np.bool_)
    places = active.scored.places
    return np.isin(places, active.kept) if places.size else None
