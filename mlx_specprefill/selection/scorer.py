"""Scores every prompt token, smoothed: by attention of the draft's calibrated heads, or by the published rule.

A scorer lets the draft read the prompt and returns the importance of each token. There are two.

`HeadScorer` is the default for a calibrated draft. Most heads of a model attend to the start, to neighbours, to
punctuation. A few copy or retrieve (retrieval heads, arXiv 2404.15574; QRHead, arXiv 2506.09944). Importance is the
weighted mean of those few, read from the rows of the question, each normalised to its attention on tokens outside
template and question. No token is generated, and the draft runs no further than the last of these heads.

`PaperScorer` is the published rule (SpecPrefill, section 3.2): look-ahead tokens, and the maximum over heads and
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapters.capture import HeadCapture, QueryCapture, pool
from ..adapters.depth import FirstLayers
from ..adapters.window import WindowedReader
from ..arrays import NO_INDICES, NO_SPANS, Bools, Floats, Indices, Spans
from ..cache.positioned import Snapshot, tokens_in
from ..config import DraftWindow, RuleName, ScoringConfig
from ..distributed.ranks import Ranks
from ..errors import SparseUnsupportedError, SpecPrefillError
from ..events import Progress
from ..prefill_report import ScorerKind
from ..request import TokenIds
from .heads import DraftHeads, Head, LineProbe
from .question_lines import asked_lines

AROUND = 48  # tokens on either side of a line that is asked again
_AT_ONCE = 256  # tokens of questions that the draft reads in one forward, in which the later ones see the others


@dataclass(frozen=True)
class ScoringInput:
    """A prompt for a scorer.

    Attributes:
        prompt: M token ids.
        question: [start, end) of the question's tokens (`question_span`).
        template: (M,) true for the tokens of template and question, which do not compete.
        stop_ids: tokens that end the draft's answer.
        cache: the draft's own mlx-lm cache, which may hold a dense prefix of the prompt up to the question at most.
            Afterwards it holds exactly the prompt.
        step: returns the tokens of each forward.
        again: [start, end) of the question in front of the text that it asks about (`repeated_question_spans`), (Q, 2):
            it is read a second time behind the prompt, and its attention counts instead. Only calibrated heads are
            read so.
        lines: that may be the question (`lines_of`). Some of them are read behind the prompt, too (`asked_lines`), and
            what one of them looks at counts beside what the question does.
        rows: tokens of these that may be read so.
        probe: says which of them ask; None: nothing but their places does.
        window: seen by the tokens in front of the question while they are read; None: everything.
        end: the question is asked right behind so many tokens of the prompt, and only they are scored; None: all.
        questions: token ids of questions that the prompt has not: they are read behind it, and count alone.
    """

    prompt: TokenIds
    question: tuple[int, int]
    template: Bools
    stop_ids: frozenset[int]
    cache: list[Any]
    step: Callable[[], int]
    again: Spans = field(default_factory=lambda: NO_SPANS)
    lines: Spans = field(default_factory=lambda: NO_SPANS)
    rows: int = 0
    probe: LineProbe | None = None
    window: DraftWindow | None = None
    end: int | None = None
    questions: tuple[TokenIds, ...] = ()

    @property
    def asked(self) -> Spans:
        """Return [start, end) of the tokens that ask, in the prompt, (Q, 2)."""
        return self.again if len(self.again) else np.array([self.question])


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of a scorer.

    Attributes:
        importance: float32 (M,), non-negative; of fewer tokens if no more were wanted (`ScoringInput.end`).
        scorer: its name.
        words: its rule and input, for a report.
        lookahead: the draft's greedy continuation, as far as it was used; empty if the scorer needs none.
        cache: the draft's, holding exactly the scored tokens.
        read: tokens, in the draft's tokenizer, that were read; the others were cached.
        places: the token that each of the input's questions looks at most, int32 (Q,); empty if they were not read.
        lines: those that may have asked beside the question, (N, 2).
        weights: how much each of them did, float32 (N,). One of more weight than 1 counts as a question, and the target
            reads it. One of 1 competes by its score as all text does.

    Raises:
        SpecPrefillError: the importance is not finite.
    """

    importance: Floats
    scorer: ScorerKind = "request"
    words: str = "the request's own scores"
    lookahead: tuple[int, ...] = ()
    cache: list[Any] = field(default_factory=list)
    read: int = 0
    places: Indices = field(default_factory=lambda: NO_INDICES)
    lines: Spans = field(default_factory=lambda: NO_SPANS)
    weights: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float32))

    def __post_init__(self) -> None:
        if not np.isfinite(self.importance).all():
            raise SpecPrefillError("the draft's attention is not finite")

    def asking(self, weight: float = 0) -> Spans:
        """Return [start, end) of the lines that asked with more than this weight, (N, 2)."""
        return self.lines[self.weights > weight]


def read_prompt(
    draft: nn.Module,
    task: ScoringInput,
    end: int,
    passage: tuple[int, int] | None = None,
    capturing: Callable[[int, int, slice], AbstractContextManager[None]] | None = None,
) -> Generator[Progress, None, None]:
    """Feed the prompt up to `end` to the draft.

    Args:
        passage: [start, end) of tokens that are read in one forward, with their attention captured.
        capturing: a context for that forward; gets the tokens in the cache after it, its own length, and where the
            passage lies in it.
    """
    tokens, M = mx.array(task.prompt)[None], task.prompt.size
    start = tokens_in(task.cache)
    first = end if passage is None else passage[0]
    window = task.window if task.window is not None and first > task.window.whole() else None
    reader = draft if window is None else WindowedReader(draft, window)
    while start < end:
        stop = min(start + task.step(), end)
        if start < first < stop and (stop < end or window is not None):
            stop = first  # the passage is read in one forward, with the tokens after it
        elif first <= start:
            stop = end
        captured: AbstractContextManager[None] = nullcontext()
        model = reader
        if passage is not None and capturing is not None and passage[0] < stop:
            captured = capturing(stop, stop - start, slice(max(passage[0] - start, 0), passage[1] - start))
            model = draft
        with captured:
            model(tokens[:, start:stop], cache=task.cache)
        mx.eval([part.state for part in task.cache])
        yield Progress("draft", stop, M)
        start = stop


@dataclass(frozen=True)
class HeadScorer:
    """Scores by calibrated heads.

    Args:
        config: `pool_width` is used.
        ranks: over which the draft's heads are split.
    """

    heads: DraftHeads
    config: ScoringConfig
    ranks: Ranks | None = None

    def score(self, draft: nn.Module, task: ScoringInput) -> Generator[Progress, None, Scores]:
        """Yield between draft forwards; return the scores.

        Raises:
            SparseUnsupportedError: no attention layer sees the whole prompt.
            SpecPrefillError: the scores are not finite.
        """
        M, end = task.prompt.size, task.prompt.size if task.end is None else task.end
        if task.questions:
            yield from read_prompt(draft, task, end)
            return (yield from self._by_questions(draft, task, end))
        if len(task.again) or end < M:
            yield from read_prompt(draft, task, end)
            asking = np.concatenate([task.prompt[start:last] for start, last in task.asked])
            rows = self._ask_again(draft, end, task.cache, [asking])
        else:
            capture = self._capture(M)
            yield from read_prompt(draft, task, M, task.question, capture.of_passage)
            rows = capture.attention
        parts = [(rows, task.template[None, :end])]
        scores = None if task.probe is None else task.probe.scores(task.cache, task.lines)
        words, weights = self._words, asked_lines(scores, task.lines, task.asked, task.rows)
        if len(asks := task.lines[weights > 0]):
            rows = self._ask_again(draft, end, task.cache, [task.prompt[start:last] for start, last in asks])
            parts.append((rows, _without_surroundings(task, end, asks)))
            words += f", {len(asks)} more lines that may ask"
        importance, *by_line = self._importance(parts)
        if by_line:
            importance = add_asks(importance, np.stack(by_line), weights[weights > 0])
        return Scores(importance, "draft", words, (), task.cache, lines=task.lines, weights=weights)

    @property
    def _words(self) -> str:
        return f"{len(self.heads.heads)} calibrated heads, {self.heads.depth} of {self.heads.layers} layers"

    def _by_questions(self, draft: nn.Module, task: ScoringInput, end: int) -> Generator[Progress, None, Scores]:
        """Score by the questions: each one's attention counts relative to its most, so that none outweighs another."""
        best, places, left = np.zeros(end, np.float32), [NO_INDICES], list(task.questions)
        while left:
            many = np.cumsum([question.size for question in left]) > _AT_ONCE
            count = max(1, int(many.argmax())) if many.any() else len(left)
            group, left = left[:count], left[count:]
            rows = self._ask_again(draft, end, task.cache, group)
            found = self._importance([(rows, np.repeat(task.template[None, :end], count, axis=0))])
            most = found.max(axis=1, keepdims=True)
            best = np.maximum(best, (found / np.where(most == 0, 1, most)).max(axis=0))
            places.append(found.argmax(axis=1).astype(np.int32))
            yield Progress("draft", task.prompt.size, task.prompt.size)
        words = f"{self._words}, {len(task.questions)} questions"
        return Scores(best, "draft", words, (), task.cache, places=np.concatenate(places))

    def _capture(self, length: int) -> HeadCapture:
        return HeadCapture(length, self.heads.by_call, 0 if self.ranks is None else self.ranks.rank)

    def _ask_again(
        self,
        draft: nn.Module,
        end: int,
        cache: list[Any],
        texts: Sequence[TokenIds],
    ) -> dict[tuple[int, int], mx.array]:
        """Feed texts behind the prompt's first `end`; return each one's attention to these by head, (P, end), queued.

        The cache is restored.
        """
        tokens = np.concatenate(texts)
        capture, snapshot, Q = self._capture(end + tokens.size), Snapshot(cache), tokens.size
        with capture.of_passage(end + Q, Q, slice(0, Q), _means([text.size for text in texts])):
            draft(mx.array(tokens)[None], cache=cache)
        mx.async_eval([part.state for part in cache], list(capture.attention.values()))  # type: ignore[no-untyped-call]
        snapshot.take_back(Q, Q)
        return {key: row[..., :end] for key, row in capture.attention.items()}

    def _importance(self, parts: Sequence[tuple[Mapping[tuple[int, int], mx.array], Bools]]) -> Floats:
        """Return the importance by each of P rows of templates, (P, M), in order of the parts.

        The host waits for the device once, and all ranks' heads are summed in one reduction.

        Args:
            parts: attention (M,) or (P', M) per (call, head), and the tokens that do not compete, (P', M).
        """
        here = [head for head in self.heads.heads if (head.call, head.head) in parts[0][0]]
        templates = np.concatenate([template for _, template in parts])
        each = [importance_of(rows, here, mask, self.config.pool_width) for rows, mask in parts] if here else []
        own = np.array(mx.concatenate(each)) if each else np.zeros(templates.shape, np.float32)
        found = np.append(own, np.float32(len(here)))  # which also counts the heads
        if self.ranks is not None:
            found = self.ranks.all_sum(found)
        if round(float(found[-1])) < len(self.heads.heads):
            raise SparseUnsupportedError("a calibrated head of the draft does not see the whole prompt")
        return found[:-1].reshape(templates.shape)


def _means(sizes: Sequence[int]) -> mx.array:
    """Return the weights of tokens in the mean of each line, float32 (P, tokens), for lines one after the other."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    parts = (numbers == np.arange(len(sizes))[:, None]) / np.bincount(numbers)[:, None]
    return mx.array(parts.astype(np.float32))


def _without_surroundings(task: ScoringInput, end: int, asks: Spans) -> Bools:
    """Return the tokens of the prompt's first `end` that do not compete for each line that may ask, (P, end): the
    template, and the line's own surroundings.
    """
    template = np.repeat(task.template[None, :end], len(asks), axis=0)
    for hidden, (start, last) in zip(template, asks, strict=True):
        hidden[max(0, start - AROUND) : last + AROUND] = True
    return template


def add_asks(importance: Floats, by_line: Floats, weights: Floats) -> Floats:
    """Return the importance (M,) by the question and by the lines that may ask, (P, M), of weights (P,).

    A line that asks looks at one place, and a line that does not at many, so of several lines the most counts. Lines of
    weight 1 may not ask at all, and text that repeats itself draws all of their attention: they add tokens by rank, so
    half of what is chosen is theirs at most.
    """
    likely = weights > 1
    total: Floats = importance + (weights[likely, None] * by_line[likely]).max(axis=0, initial=0.0)
    if likely.all():
        return total
    others = by_line[~likely].max(axis=0)
    raised = np.empty_like(others)
    raised[np.argsort(-others)] = np.sort(importance)[::-1]
    seen = np.where(others == 0, 0, raised + 0 * others)  # keeps what is no number, to be refused
    return np.asarray(np.maximum(total, seen))


def importance_of(
    rows: Mapping[tuple[int, int], mx.array | Floats], heads: Sequence[Head], template: Bools, width: int
) -> mx.array:
    """Return importance float32 from attention rows per (call, head), all (M,) or (P, M), not computed yet. Skips heads
    without attention.

    Args:
        template: tokens that do not compete, (M,) or (P, M); attention on them is ignored.
        width: taps of the mean over neighbouring tokens.
    """
    competing = mx.array(~template).astype(mx.float32)
    stacked = mx.stack([mx.array(rows[head.call, head.head]) for head in heads], axis=-2)  # (H, M) or (P, H, M)
    mass = stacked @ competing[..., None]
    # A mass that is no number passes, to be refused later.
    shares = mx.where(mass == 0, 0, mx.array([[head.weight] for head in heads], dtype=mx.float32) / mass)
    total = (shares.swapaxes(-1, -2) @ stacked)[..., 0, :]
    return pool(total * competing, width)


@dataclass(frozen=True)
class PaperScorer:
    """Scores by the paper's rule.

    Args:
        config: `rows` and `pool_width` are used.
        ranks: over which the draft's heads are split.
    """

    config: ScoringConfig
    ranks: Ranks | None = None

    def score(self, draft: nn.Module, task: ScoringInput) -> Generator[Progress, None, Scores]:
        """Score as `HeadScorer`. First layers generate no answer: the last prompt token is their only row."""
        M = task.prompt.size
        capture = QueryCapture(M, self.config.pool_width)
        yield from read_prompt(draft, task, M - 1)
        last = mx.array(task.prompt[-1:])[None]
        if isinstance(draft, FirstLayers):
            looked_ahead = _last_row(draft, last, capture, task)
        else:
            looked_ahead = _look_ahead(draft, last, capture, task.cache, self.config, self.ranks)
        yield Progress("draft", M, M)
        return _scores(capture, looked_ahead, self.config, task, self.ranks)


def _look_ahead(
    draft: nn.Module,
    last: mx.array,
    capture: QueryCapture,
    cache: list[Any],
    config: ScoringConfig,
    ranks: Ranks | None,
) -> mx.array:
    """Feed the last prompt token and the greedy tokens after it, capturing; then restore the cache after `last`.

    All steps are queued without waiting for a token's value. The end of the answer is found afterwards.
    """
    M = capture.prompt_len
    with capture.row(M):
        logits = draft(last, cache=cache)
    snapshot = Snapshot(cache)
    fed = config.rows - len(capture.rows)
    generated = [_greedy(logits, ranks)]
    for step in range(1, fed + 1):
        with capture.row(M + step):
            logits = draft(generated[-1][None], cache=cache)
        generated.append(_greedy(logits, ranks))
        mx.async_eval(generated[-1], capture.rows)  # type: ignore[no-untyped-call]
    snapshot.take_back(fed, fed)
    looked_ahead = mx.concatenate(generated)
    mx.eval(looked_ahead, capture.rows, [part.state for part in cache])
    return looked_ahead


def _greedy(logits: mx.array, ranks: Ranks | None) -> mx.array:
    """Return the likeliest next token (1,), rank 0's if there are several ranks."""
    token = mx.argmax(logits[:, -1, :], axis=-1)
    return token if ranks is None else ranks.broadcast_tokens(token)


def _last_row(draft: FirstLayers, last: mx.array, capture: QueryCapture, task: ScoringInput) -> mx.array:
    """Feed the last prompt token to layers without an output head: its own row, and no token."""
    with capture.row(capture.prompt_len):
        draft(last, cache=task.cache)
    mx.eval(capture.rows, [part.state for part in task.cache])
    return mx.array([], dtype=mx.uint32)


def _scores(
    capture: QueryCapture, looked_ahead: mx.array, config: ScoringConfig, task: ScoringInput, ranks: Ranks | None
) -> Scores:
    if not capture.rows:
        raise SparseUnsupportedError("no attention layer of the draft sees the whole prompt")
    generated = [int(token) for token in np.array(looked_ahead)]
    ended = next((i for i, token in enumerate(generated) if token in task.stop_ids), len(generated))
    rows = min(len(capture.rows), ended + 1)  # row t reads the token before generated[t]
    attention = mx.stack(capture.rows[:rows])
    if ranks is not None:
        attention = ranks.all_max(attention)
    importance = np.array(attention.mean(axis=0))
    words = f"{rows} look-ahead rows, maximum over the heads of {capture.layers[0]} layers"
    return Scores(importance, "draft", words, tuple(generated[: ended + 1][: config.rows]), task.cache)


def scorer_for(
    rule: RuleName, heads: DraftHeads | None, config: ScoringConfig, ranks: Ranks | None = None
) -> HeadScorer | PaperScorer:
    """Return the paper's scorer if the rule asks for it, or if no heads of the draft are known; else the head scorer.

    Args:
        ranks: over which the draft's attention heads are split; None: they are all here.
    """
    if rule == "paper" or heads is None:
        return PaperScorer(config, ranks)
    return HeadScorer(heads, config, ranks)
