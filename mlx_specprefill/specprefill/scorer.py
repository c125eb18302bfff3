"""Importance of every prompt token.

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
import numpy.typing as npt

from ..adapters.capture import DraftHeads, Head, HeadCapture, QueryCapture, pool
from ..adapters.depth import FirstLayers
from ..cache.positioned import Snapshot, leaves
from ..config import RuleName, ScoringConfig
from ..distributed.ranks import Ranks
from ..errors import SparseUnsupportedError, SpecPrefillError
from ..request import Progress, PromptSpan, ScorerKind

Bools = npt.NDArray[np.bool_]


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
        again: question tokens in front of the text that they ask about, int32 (Q,): they are read a second time behind
            the prompt, and their attention counts instead of the question's. Only calibrated heads are read so.
        seen: called at every forward with the index of its first token and the draft's output; None: not called.
        cuts: lengths before the question, ascending, at which a forward ends; `on_cut` is called with each.
    """

    prompt: npt.NDArray[np.int32]
    question: tuple[int, int]
    template: Bools
    stop_ids: frozenset[int]
    cache: list[Any]
    step: Callable[[], int]
    again: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    seen: Callable[[int, mx.array], None] | None = None
    cuts: Sequence[int] = ()
    on_cut: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of a scorer.

    Attributes:
        importance: float32 (M,), non-negative.
        scorer: its name.
        words: its rule and input, for a report.
        lookahead: the draft's greedy continuation, as far as it was used; empty if the scorer needs none.
        cache: the draft's, holding exactly the prompt.
        read: tokens, in the draft's tokenizer, that were read; the others were cached.

    Raises:
        SpecPrefillError: the importance is not finite.
    """

    importance: npt.NDArray[np.float32]
    scorer: ScorerKind = "request"
    words: str = "the request's own scores"
    lookahead: tuple[int, ...] = ()
    cache: list[Any] = field(default_factory=list)
    read: int = 0

    def __post_init__(self) -> None:
        if not np.isfinite(self.importance).all():
            raise SpecPrefillError("the draft's attention is not finite")


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: npt.NDArray[np.int32] | None = None
) -> tuple[int, int]:
    """Return [start, end) of the question's tokens, at least one.

    Args:
        end: of the last message; the prompt's if not given.
        units: starts of lines and sentences. The last one before `end` is the question, within the limits of
            `ScoringConfig.question_rows`. Without units the lower limit gives the number of tokens.
    """
    least, most = config.question_rows
    end = prompt_len if end is None else max(1, min(end, prompt_len))
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    return max(0, end - rows), end


def repeated_question_spans(
    spans: Sequence[PromptSpan], config: ScoringConfig, units: npt.NDArray[np.int32]
) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, end) of the question in a prompt that ends with tool results, in reading order.

    These are the model's last call with the text before it, and the last line or sentence of the last user message,
    each with header and end marker. Empty if the prompt ends with another kind of message: that one is the question.
    """
    users = [span for span in spans if span.kind == "user"]
    if not users or spans[-1].kind != "tool":
        return ()
    user = users[-1]
    called = next((span for span in reversed(spans) if span.kind == "assistant" and span.start > user.start), None)
    places = []
    if called is not None:
        said = max(called.content_start, called.content_end - config.question_rows[1])
        places += [(called.start, called.content_start), (said, called.end)]
    asked = max(user.content_start, question_span(user.content_end, config, units=units)[0])
    places += [(user.start, user.content_start), (asked, user.end)]
    return tuple((start, end) for start, end in places if start < end)


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
    while start < end:
        stop = min(start + task.step(), end)
        stop = next((cut for cut in task.cuts if start < cut < stop), stop)
        if start < first < stop < end:
            stop = first  # the passage is read in one forward, with the tokens after it
        elif first <= start:
            stop = end
        captured: AbstractContextManager[None] = nullcontext()
        if passage is not None and capturing is not None and passage[0] < stop:
            captured = capturing(stop, stop - start, slice(max(passage[0] - start, 0), passage[1] - start))
        with captured:
            returned = draft(tokens[:, start:stop], cache=task.cache)
        if task.seen is not None:
            task.seen(start, returned)
        mx.eval([part.state for part in task.cache])
        if stop in task.cuts:
            task.on_cut(stop)
        yield Progress("draft", stop, M)
        start = stop


def tokens_in(cache: list[Any]) -> int:
    """Return the number of tokens that the draft's cache has read."""
    return max((int(part.offset) for part in leaves(cache) if hasattr(part, "offset")), default=0)


Floats = npt.NDArray[np.float32]


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
        M = task.prompt.size
        capture = HeadCapture(M + task.again.size, self.heads.by_call, 0 if self.ranks is None else self.ranks.rank)
        if task.again.size:
            yield from read_prompt(draft, task, M)
            _ask_again(draft, task, capture)
        else:
            yield from read_prompt(draft, task, M, task.question, capture.of_passage)
        importance = self._importance({key: np.array(row)[:M] for key, row in capture.attention.items()}, task)
        words = f"{len(self.heads.heads)} calibrated heads, {self.heads.depth} of {self.heads.layers} layers"
        return Scores(importance, "draft", words, (), task.cache)

    def _importance(self, rows: Mapping[tuple[int, int], Floats], task: ScoringInput) -> Floats:
        """Sum the importance over all ranks' heads in one reduction, which also counts the heads."""
        here = [head for head in self.heads.heads if (head.call, head.head) in rows]
        own = np.zeros(task.prompt.size, dtype=np.float32)
        if here:
            own = importance_of(rows, here, task.template, self.config.pool_width)
        found = np.append(own, np.float32(len(here)))
        if self.ranks is not None:
            found = self.ranks.all_sum(found)
        if round(float(found[-1])) < len(self.heads.heads):
            raise SparseUnsupportedError("a calibrated head of the draft does not see the whole prompt")
        return found[:-1]


def _ask_again(draft: nn.Module, task: ScoringInput, capture: HeadCapture) -> None:
    """Feed the question again behind the prompt, capturing; then restore the cache."""
    snapshot, Q = Snapshot(task.cache), task.again.size
    with capture.of_passage(task.prompt.size + Q, Q, slice(0, Q)):
        draft(mx.array(task.again)[None], cache=task.cache)
    mx.eval([part.state for part in task.cache], list(capture.attention.values()))
    snapshot.take_back(Q, Q)


def importance_of(rows: Mapping[tuple[int, int], Floats], heads: Sequence[Head], template: Bools, width: int) -> Floats:
    """Return importance (M,) float32 from attention rows (M,) per (call, head). Skips heads without attention.

    Args:
        template: (M,) tokens that do not compete; attention on them is ignored.
        width: taps of the mean over neighbouring tokens.
    """
    total = np.zeros_like(next(iter(rows.values())), dtype=np.float32)
    for head in heads:
        row = rows[head.call, head.head]
        open_to_choice = np.where(template, np.float32(0), row)
        mass = float(open_to_choice.sum())
        if mass != 0:  # values that are not finite pass, to be refused later
            total += np.float32(head.weight / mass) * open_to_choice
    return np.array(pool(mx.array(total), width))


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
        returned = draft(last, cache=task.cache)
    if task.seen is not None:
        task.seen(task.prompt.size - 1, returned)
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
