"""Decides which tokens the target reads: all, or the best by the draft's scores, behind the draft's cached prefix."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...adapters.depth import full_draft_model
from ...adapters.moved_keys import Piece, append, cut
from ...adapters.window import WindowedReader
from ...arrays import NO_SPANS, Indices
from ...cache.feeding import feed, forward_ends
from ...cache.positioned import tokens_in
from ...config import EngineConfig
from ...errors import Refused, RequestCancelled, SparseUnsupportedError
from ...events import Progress
from ...pair import ModelPair
from ...prefill_report import Reason
from ...request import GenerationRequest, TokenIds
from ...selection.mapped import MappedTask, map_task
from ...selection.plan import PrefillPlan, template_mask
from ...selection.question_lines import lines_of, question_span, repeated_question_spans, rows_of
from ...selection.scorer import HeadScorer, Scores, ScoringInput, scorer_for
from ...selection.selector import select_part, select_recalled, selection_by
from ...selection.text import PromptText, TextReader
from ...selection.words import word_factors
from ..estimating import Estimating
from ..prefixes.caches import EngineCaches, draft_window
from ..prefixes.edited_prefix import EditedPrefixes
from ..prefixes.lookup import Prefix
from ..requests.active_request import ActiveRequest, Scored

Scoring = Generator[Progress, None, Scores]
_LAGS = "nothing is recalled: the draft would read more than half of what is new first"


class DraftContextError(SparseUnsupportedError):
    """The prompt has more of the draft's tokens than the draft's context."""


class Extension(NamedTuple):
    """A prompt whose new text is read whole, so that its scores serve for recall alone. Counts of tokens.

    Attributes:
        start: in front of the new text.
        dropped: up to the last one that earlier turns dropped.
    """

    start: int
    dropped: int


class PromptScorer:
    """Lets the draft score prompts, and chooses what is read by the scores.

    Args:
        step: returns the tokens of the draft's next forward.
    """

    def __init__(
        self,
        pair: ModelPair,
        config: EngineConfig,
        caches: EngineCaches,
        edits: EditedPrefixes,
        step: Callable[[], int],
        estimating: Estimating,
    ) -> None:
        self.estimating = estimating
        self.pair = pair
        self.config = config
        self.caches = caches
        self.edits = edits
        self.step = step
        self.text = TextReader(pair.tokenizer)
        self._whole = None if pair.draft is None else full_draft_model(pair.draft)
        self._window = draft_window(pair, config)

    def recalls(self, request: GenerationRequest, prefix: Prefix) -> bool:
        """Return whether the draft scores what was dropped of a prefix, for the request may ask for it."""
        return self.pair.has_draft and prefix.may_recall(request)

    def choose(self, active: ActiveRequest, scores: Scores) -> Indices:
        """Return the indices to read by these scores, ascending: of the prefix what is unread or recalled, and of what
        follows it all or a part.
        """
        planned, plan = active.plan, active.plan.asking(scores.asking(1))
        active.plan = plan
        prefix, text, L = active.prefix, active.text, active.prefix.length
        active.scored = Scored(scores.scorer, scores.words, scores.read + active.scored.draft_read, scores.places)
        config, new = selection_by(plan.rule, self.config.selection), np.arange(L, plan.forced.size, dtype=np.int32)
        select = partial(select_part, scores.importance, plan.forced, text, plan.keep, config)
        recalled = prefix.unread
        if self.recalls(active.request, prefix):
            held = np.concatenate([prefix.settled, recalled])
            selection = select(end=min(L, scores.importance.size))
            again = select_recalled(selection, held, config.stands_out, self.config.policy.recall_share)
            asked = prefix.dropped[(plan.forced > planned.forced)[prefix.dropped]]
            recalled = np.concatenate([recalled, again, asked])
        if plan.mode == "sparse":
            first = L - L % config.chunk_size  # chunks start where an earlier turn's chunks start
            new = select(start=first).kept + np.int32(first)
            new = new[new >= L]
        if prefix.change is None:
            return np.union1d(recalled, new)
        edit = prefix.change.around(new)
        active.prefix, active.plan = prefix.behind(edit, None), replace(plan, reason=Reason("reused", edit.words))
        return np.concatenate([edit.unread, edit.later])

    def scores(
        self,
        request: GenerationRequest,
        plan: PrefillPlan,
        text: PromptText,
        extension: Extension | None = None,
    ) -> Scoring:
        """Return the steps to the request's own scores, else to the draft's, which resume from its dense prefix.

        Args:
            extension: calibrated heads ask the question right behind what the draft has read, even if that is little.

        Raises:
            SparseUnsupportedError: raised in the first step: there is no draft, or it can't score.
            DraftContextError: the draft has another tokenizer, and the prompt is too long for it.
        """
        if (given := request.specprefill.importance) is not None:
            if not self.estimating.wants(request, plan):
                return _given(Scores(given))
            plan = replace(plan, rule="default")  # it is read for the estimates alone
        task = self._task(request, plan, text, extension)
        raised = partial(self._raised, request, plan, text, task)
        if self.pair.mapping is not None:
            return self._mapped(request, plan, map_task(self.pair.mapping, task), extension, raised)
        return self._by_draft(request, plan, task, extension, raised)

    def _mapped(
        self,
        request: GenerationRequest,
        plan: PrefillPlan,
        mapped: MappedTask,
        extension: Extension | None,
        raised: Callable[[Scores], Scores],
    ) -> Scoring:
        size, context = mapped.task.prompt.size, self.pair.draft_context
        if context is not None and size > context:
            raise DraftContextError(f"the prompt has {size} tokens of the draft's, the draft's context {context}")
        if extension is not None:
            extension = Extension(*(mapped.text.span(0, end)[1] for end in extension))
        steps = self._by_draft(request, plan, mapped.task, extension)
        return _converted(steps, lambda scores: raised(mapped.scores(scores)))

    def asking(
        self, request: GenerationRequest, plan: PrefillPlan, text: PromptText, scores: Scores
    ) -> tuple[tuple[int, int], ...]:
        """Return the ranges [start, end) of the prompt whose attention scores it, ascending.

        Empty for other scores: the request's own, and those of tokens that the draft looks ahead at.
        """
        if request.specprefill.importance is not None or plan.rule == "paper" or self.pair.heads is None:
            return ()
        asked = np.concatenate([self._task(request, plan, text).asked, scores.asking()])
        return tuple((start, end) for start, end in np.unique(asked, axis=0).tolist())

    def _raised(
        self, request: GenerationRequest, plan: PrefillPlan, text: PromptText, task: ScoringInput, scores: Scores
    ) -> Scores:
        """Return the scores, by heads with more for the lines that share words with the question."""
        if plan.rule == "paper" or self.pair.heads is None:
            return scores
        asking = [*task.asked.tolist(), *scores.asking(1).tolist()]
        if request.questions:
            text = self.text.read(np.concatenate([request.prompt, *task.questions]))
            asking = [[len(request.prompt), len(text.pieces)]]
        factors = word_factors(text, asking)[: scores.importance.size]
        return replace(scores, importance=scores.importance * factors)

    def _task(
        self, request: GenerationRequest, plan: PrefillPlan, text: PromptText, extension: Extension | None = None
    ) -> ScoringInput:
        scoring, heads, is_paper = self.config.scoring, self.pair.heads, plan.rule == "paper"
        said = request.spans[-1].content_end if request.spans else None
        question = question_span(len(request.prompt), scoring, said, text.units)
        if request.questions:  # they are read behind the prompt, in which nothing asks
            question = len(request.prompt) - 1, len(request.prompt)
        again = NO_SPANS if is_paper else repeated_question_spans(request.spans, scoring, text.units)
        template = template_mask(request.spans, question, plan.forced)
        for start, end in again:
            template[start:end] |= plan.forced[start:end]
        # What the draft has not read has no values, and of several ranks each holds a part of them.
        probe = None if heads is None or extension is not None or self.pair.split is not None else heads.probe
        # By its place alone nothing asks in a text that is to be continued.
        none = is_paper or request.questions or not (request.spans or probe)
        lines = NO_SPANS if none else lines_of(request.spans, len(request.prompt), text.units)
        if extension is not None:
            lines = lines[lines[:, 0] >= extension.start]
        return ScoringInput(
            prompt=request.prompt,
            question=question,
            template=template,
            again=again,
            lines=lines,
            probe=probe,
            stop_ids=request.stop_token_ids | self.pair.eos_token_ids,
            cache=[],
            step=self.step,
            questions=tuple(question.tokens for question in request.questions),
        )

    def _by_draft(
        self,
        request: GenerationRequest,
        plan: PrefillPlan,
        task: ScoringInput,
        extension: Extension | None,
        raised: Callable[[Scores], Scores] = lambda scores: scores,
    ) -> Scoring:
        """Score with the draft. `raised` changes the scores at the end."""
        if self.pair.draft is None or self._whole is None:
            raise SparseUnsupportedError("no draft model is loaded")
        draft = self._whole if plan.rule == "paper" else self.pair.draft
        window = self._window if plan.rule != "paper" else None
        stored = draft is self.pair.draft and window == self._window  # as the cached prefixes were read
        prompt, label = task.prompt, request.label
        keeper = request if self.pair.mapping is None else replace(request, spans=())  # spans count target tokens
        # The question is read anew even if it is cached: a hit must not change the scores.
        known = task.prompt.size - 1 if len(task.again) or task.questions else task.question[0]
        hit = (yield from self.caches.draft_prefix(prompt[: known + 1], label)) if stored and known else None
        cache = list(make_prompt_cache(draft)) if hit is None else hit.cache
        room = len(prompt) if self.pair.draft_context is None else (self.pair.draft_context - len(prompt)) // 2
        task = replace(task, cache=cache, window=window, rows=min(rows_of(len(prompt)), max(room, 0)))
        scorer = scorer_for(plan.rule, self.pair.heads, self.config.scoring, self.pair.split)
        read = 0 if hit is None else hit.length
        if extension is not None:
            by_heads = isinstance(scorer, HeadScorer)
            end = extension.dropped if by_heads else extension.start - self.config.scoring.question_rows[1]
            new = len(prompt) - extension.start + sum(question.size for question in task.questions)
            if end - read > new // 2:
                return Scores(np.zeros(extension.start, np.float32), "draft", _LAGS)
            task = _behind(task, max(read, end), extension.start) if by_heads else task
        try:
            scores = yield from scorer.score(draft, task)
        except RequestCancelled:
            if stored:
                self._keep_part(prompt, task.cache, keeper)
            raise
        if stored:
            self.caches.keep_draft(prompt[: scores.importance.size], task.cache, keeper)
        scores = replace(raised(scores), read=scores.importance.size - read)
        if request.specprefill.importance is not None:
            return replace(
                scores, importance=request.specprefill.importance, scorer="request", weights=0 * scores.weights
            )
        return replace(scores, scorer="self") if self._whole is self.pair.target else scores

    def read(self, draft: nn.Module, request: GenerationRequest) -> Generator[Progress, None, list[Any]]:
        """Let the draft read the whole prompt, in its own tokens, to propose after a full prefill or to score the next
        turn.

        Returns:
            The draft's cache.
        """
        prompt = request.prompt
        hit = yield from self.caches.draft_prefix(prompt, request.label)
        start = hit.length if hit is not None else 0
        cache = hit.cache if hit is not None else list(make_prompt_cache(draft))
        yield Progress("draft", start, len(prompt))
        reader = draft if self._window is None else WindowedReader(draft, self._window)
        try:
            for done, _ in feed(reader, cache, prompt[start:], None, forward_ends(prompt.size - start, self.step)):
                yield Progress("draft", start + done, prompt.size)
        except RequestCancelled:
            self._keep_part(prompt, cache, request)
            raise
        self.caches.keep_draft(prompt, cache, request)
        return cache

    def follow(self, active: ActiveRequest) -> Generator[Progress, None, None]:
        """Let the draft read what an edit inserts, and keep all that it has read behind it at its new place, where it
        has to know what was dropped there.

        Its scores of the kept text are then a little off. Nothing but scores and proposals comes of them.
        """
        request, draft, edit = active.request, self.pair.draft, active.prefix.edit
        if draft is None or edit is None or not edit.is_sparse:
            return
        active.stage, rotations, read_to, read = "draft", self.edits.layers("draft"), edit.passages[0].old, 0
        prompt, known = request.prompt, self.caches.draft_covers(request.prompt, request.label) or 0
        hit = yield from self.caches.draft_prefix(np.append(edit.cached, np.int32(0)), request.label, again=True)
        if isinstance(rotations, Refused) or known > edit.passages[0].new or hit is None or hit.length <= read_to:
            return
        reader = draft if self._window is None else WindowedReader(draft, self._window)
        whole = cut(hit.cache, read_to)
        for old, new, size in edit.passages:
            if old >= hit.length:
                break
            for done, _ in feed(reader, hit.cache, prompt[read_to:new], None, forward_ends(new - read_to, self.step)):
                yield Progress("draft", read + done, prompt.size)
            size = min(size, hit.length - old)
            append(hit.cache, whole, rotations, Piece(old, new, size))
            read, read_to = read + new - read_to, new + size
        self.caches.keep_draft(prompt[:read_to], hit.cache, request)
        active.scored = Scored(draft_read=read)

    def catch_up(self, request: GenerationRequest) -> Generator[Progress, None, None]:
        """Let the draft read what it has not read of the prompt, to score the next turn, if the draft's context has
        room for it.
        """
        draft, mapping, context = self.pair.draft, self.pair.mapping, self.pair.draft_context
        if mapping is not None:  # spans count target tokens
            request = replace(request, prompt=mapping.read(request.prompt).tokens, spans=())
        if draft is not None and (context is None or len(request.prompt) <= context):
            yield from self.read(draft, request)

    def _keep_part(self, prompt: TokenIds, cache: list[Any], keeper: GenerationRequest) -> None:
        """Keep what the draft has read of a prompt when it is stopped: a later reading goes on from there."""
        if 0 < (done := tokens_in(cache)) < len(prompt):
            self.caches.keep_draft(prompt[:done], cache, keeper)


def _behind(task: ScoringInput, end: int, start: int) -> ScoringInput:
    """Ask what the text from `start` on asks right behind the prompt's first `end` tokens."""
    question = min(max(start, task.question[0]), task.question[1] - 1), task.question[1]
    return replace(task, end=end, question=question)


def _given(scores: Scores) -> Scoring:
    yield from ()
    return scores


def _converted(steps: Scoring, convert: Callable[[Scores], Scores]) -> Scoring:
    return convert((yield from steps))
