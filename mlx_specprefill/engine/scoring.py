"""Scores a prompt with the request's own scores or with the draft, reusing the draft's cached prefix.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..adapters.depth import full_draft_model
from ..adapters.text_mapping import TextMapping
from ..config import EngineConfig
from ..errors import RequestCancelled, SparseUnsupportedError
from ..loading import ModelPair
from ..request import GenerationRequest, Progress
from ..specprefill.mapped import MappedTask, map_task
from ..specprefill.plan import PrefillPlan, template_mask
from ..specprefill.scorer import Scores, ScoringInput, question_span, repeated_question_spans, scorer_for, tokens_in
from ..specprefill.selector import PromptText
from ..specprefill.sparse_prefill import HiddenStates
from .caches import EngineCaches, empty_draft_cache

__all__ = ["DraftContextError", "PromptScorer"]

Scoring = Generator[Progress, None, Scores]


class DraftContextError(SparseUnsupportedError):
    """The prompt has more of the draft's tokens than the draft's context."""


class PromptScorer:
    """Scores prompts.

    Args:
        step: returns the tokens of the draft's next forward.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, caches: EngineCaches, step: Callable[[], int]) -> None:
        self.pair = pair
        self.config = config
        self.caches = caches
        self.step = step
        self._stop_ids = pair.eos_token_ids
        self._ranks = pair.split
        self._whole = None if pair.draft is None else full_draft_model(pair.draft)

    def scores(
        self, request: GenerationRequest, plan: PrefillPlan, text: PromptText, hidden: HiddenStates | None = None
    ) -> Scoring:
        """Return the request's own scores, else the draft's, which resume from its dense prefix.

        Args:
            hidden: stores the hidden states of the draft, the target's own first layers. The draft reads anew from its
                `known` on.

        Raises:
            SparseUnsupportedError: there is no draft, or it can't score.
            DraftContextError: the draft has another tokenizer, and the prompt is too long for it.
        """
        if request.specprefill.importance is not None:
            return Scores(request.specprefill.importance)
        return (yield from self._by_the_draft(request, plan, text, hidden))

    def _by_the_draft(
        self, request: GenerationRequest, plan: PrefillPlan, text: PromptText, hidden: HiddenStates | None
    ) -> Scoring:
        task = self._task(request, plan, text)
        if self.pair.mapping is not None:
            mapped = self._mapped(self.pair.mapping, task)
            return mapped.scores((yield from self._by_draft(request, plan, mapped.task, mapped.task.question[0])))
        known = task.prompt.size - 1 if task.again.size else task.question[0]
        if hidden is None:
            return (yield from self._by_draft(request, plan, task, known))
        task = replace(task, seen=hidden.keep)
        return (yield from self._by_draft(request, plan, task, min(known, hidden.known)))

    def _mapped(self, mapping: TextMapping, task: ScoringInput) -> MappedTask:
        """Convert the task to the draft's own tokens.

        Raises:
            DraftContextError: they exceed the draft's context.
        """
        mapped = map_task(mapping, task)
        size, context = mapped.task.prompt.size, self.pair.draft_context
        if context is not None and size > context:
            raise DraftContextError(f"the prompt has {size} tokens of the draft's, the draft's context {context}")
        return mapped

    def asked(self, request: GenerationRequest, text: PromptText) -> tuple[int, int]:
        """Return [start, end) of the prompt's tokens that hold the question."""
        said = request.spans[-1].content_end if request.spans else None
        return question_span(len(request.prompt), self.config.scoring, said, text.units)

    def _task(self, request: GenerationRequest, plan: PrefillPlan, text: PromptText) -> ScoringInput:
        question = self.asked(request, text)
        before = () if plan.rule == "paper" else repeated_question_spans(request.spans, self.config.scoring, text.units)
        template = template_mask(request.spans, question, plan.forced)
        for start, end in before:
            template[start:end] |= plan.forced[start:end]
        none = np.zeros(0, dtype=np.int32)
        return ScoringInput(
            prompt=request.prompt,
            question=question,
            template=template,
            again=np.concatenate([none, *(request.prompt[start:end] for start, end in before)]),
            stop_ids=request.stop_token_ids | self._stop_ids,
            cache=[],
            step=self.step,
        )

    def _by_draft(self, request: GenerationRequest, plan: PrefillPlan, task: ScoringInput, known: int) -> Scoring:
        """Score with the draft. A cached prefix may cover `known` tokens."""
        if self.pair.draft is None or self._whole is None:
            raise SparseUnsupportedError("no draft model is loaded")
        draft = self._whole if plan.rule == "paper" else self.pair.draft
        stored = draft is self.pair.draft  # cached prefixes belong to the default scoring layers
        prompt, label = task.prompt, request.label
        keeper = request if self.pair.mapping is None else replace(request, spans=())  # spans count target tokens
        # The question is read anew even if it is cached: a hit must not change the scores.
        hit = self.caches.draft_prefix(prompt[: known + 1], label) if stored and known else None
        empty = empty_draft_cache(self.pair) if stored else list(make_prompt_cache(draft))
        task = replace(task, cache=empty if hit is None else hit.cache)
        scorer = scorer_for(plan.rule, self.pair.heads, self.config.scoring, self._ranks)
        try:
            scores = yield from scorer.score(draft, task)
        except RequestCancelled:
            if stored and 0 < (done := tokens_in(task.cache)) < len(prompt):
                self.caches.keep_draft(prompt[:done], task.cache, keeper)
            raise
        if stored:
            self.caches.keep_draft(prompt, task.cache, keeper)
        scores = replace(scores, read=len(prompt) - (0 if hit is None else hit.length))
        return replace(scores, scorer="self") if self._whole is self.pair.target else scores
