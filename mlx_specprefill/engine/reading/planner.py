"""Decides full or sparse prefill once it is known what is cached: by the request, then by the predicted times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ...config import EngineConfig, SpecPrefillPolicy
from ...pair import ModelPair
from ...prefill_report import Prediction, Reason, ReasonCode
from ...request import GenerationRequest
from ...selection.plan import (
    PrefillPlan,
    extended,
    in_mode_of,
    likely_kept,
    pays,
    plan_prefill,
)
from ..prefixes.caches import EngineCaches
from ..prefixes.edited_prefix import Edit
from ..prefixes.lookup import Prefix, Prefixes, asks_anew
from .chunks import ChunkSizer
from .costs import CostModel
from .scoring import PromptScorer


class Planner:
    """Plans prefills.

    Args:
        costs: predicts their times.
        chunks: sizes their chunks.
    """

    def __init__(
        self,
        pair: ModelPair,
        config: EngineConfig,
        caches: EngineCaches,
        costs: CostModel,
        chunks: ChunkSizer,
        scorer: PromptScorer,
        prefixes: Prefixes,
    ) -> None:
        self._pair = pair
        self._config = config
        self._caches = caches
        self._costs = costs
        self._chunks = chunks
        self._scorer = scorer
        self._prefixes = prefixes
        words = pair.sparse_refusal
        self._refusal = None if words is None else Reason("unsupported" if pair.has_draft else "no-draft", words)

    def predict(self, tokens: int, cached: int, kept: int, read: int | None = None, asked: int = 0) -> Prediction:
        """Return the times of both prefills of a prompt if the target sees `kept` of its uncached tokens.

        May be called from any thread.

        Args:
            read: tokens that the draft's cache holds; None: as many as the target's.
            asked: tokens of questions behind the prompt.
        """
        sizes = self._chunks.expected_tokens("prefill"), self._chunks.expected_tokens("draft")
        return self._costs.predict(tokens, kept, cached, sizes, cached if read is None else read, asked)

    def plan(self, request: GenerationRequest, cached: int | None = None) -> PrefillPlan:
        """Choose a sparse or a full prefill for a request. May be called from any thread.

        Args:
            cached: tokens that the target's cache holds; None: not known yet.
        """
        pair = self._pair
        read = None if cached is None else self._caches.draft_covers(request.prompt[:-1], request.label)
        predict = partial(self.predict, len(request.prompt), cached or 0, read=read, asked=request.asked)
        return plan_prefill(
            request,
            self._config,
            sparse_refusal=self._refusal or self._refuse_questions(request),
            # The number of tokens for a draft with another tokenizer is known only after tokenizing.
            draft_context=pair.draft_context if pair.mapping is None else None,
            cached_tokens=cached,
            predict=predict if pair.has_draft else None,
            gains_are_known=self._config.calibration_file is not None and self._costs.are_measured,
        )

    def _refuse_questions(self, request: GenerationRequest) -> Reason | None:
        """Return why questions behind a prompt can't choose what is read of it; None if they can."""
        if not request.questions or request.specprefill.importance is not None:
            return None
        if self._pair.heads is not None and (request.specprefill.rule or self._config.rule) != "paper":
            return None
        return Reason("unsupported", "questions behind the prompt are scored by calibrated heads alone")

    def decide(self, request: GenerationRequest, submitted: PrefillPlan) -> tuple[PrefillPlan, Prefix]:
        """Return the plan behind what is cached of the prompt, and that. MLX thread only.

        Args:
            submitted: the plan before that was known. Memory is reserved for its mode.
        """
        plan, prefix = submitted, self._prefixes.find_prefix(request, submitted.selection_key)
        if plan.mode == "sparse" or plan.selection_key is not None or plan.predicted is not None:
            plan = in_mode_of(submitted, self.plan(request, prefix.length))
        code = plan.reason.code
        if not prefix.is_dense:
            absent = int(prefix.dropped.size) if request.about_session else None
            plan = extended(plan, len(request.prompt) - prefix.length, absent)
        if plan.predicted is not None and (plan.mode == "sparse" or not prefix.is_dense):
            plan = replace(plan, predicted=self._predict_ways(request, prefix, plan))
        if prefix.miss is not None and self._may_reuse(request, plan):  # else no cached prompt has much of the rest
            return self._reuse(request, plan, prefix, code)
        return plan, prefix

    def _predict_ways(self, request: GenerationRequest, prefix: Prefix, plan: PrefillPlan) -> Prediction:
        """Return the time of the way taken, and that of full reading, which finds other prefixes: all dense ones."""
        assert plan.predicted is not None
        prompt, M, L, taken = request.prompt, len(request.prompt), prefix.length, plan.predicted.sparse_ms
        if plan.mode == "full":
            new = self.predict(M, L, M - L, max(L, M - self._config.scoring.question_rows[1]), request.asked)
            taken = new.sparse_ms if self._scorer.recalls(request, prefix) else new.full_ms
        dense, _ = self._caches.held(prompt[:-1], request.label)
        return replace(self.predict(M, dense, 0, asked=request.asked), sparse_ms=taken)

    def _may_reuse(self, request: GenerationRequest, plan: PrefillPlan) -> bool:
        """Return whether the request leaves the way to the server, and the server reuses."""
        key = plan.selection_key
        if not self._config.policy.reuse or request.specprefill.keep_pct is not None:
            return False
        return key is not None and not key.forced and key.rule == "default"

    def _reuse(
        self, request: GenerationRequest, plan: PrefillPlan, prefix: Prefix, code: ReasonCode
    ) -> tuple[PrefillPlan, Prefix]:
        """Return the plan and the prefix behind an edit of another cached prompt, where that pays, else these.

        It would read a part, or all only because that is sooner or nothing may be dropped, as of tools.
        """
        edits, rereads = self._prefixes.edits, self._prefixes.rereads(plan.selection_key)
        # Behind an edit, what the map made could not be told from what was read behind other text.
        key = edits.movable(None if rereads else plan.selection_key)
        edit = edits.find(request, key) if plan.mode == "sparse" or code in ("predicted", "forced") else None
        if edit is not None and not (edit.is_thin and asks_anew(request, edit.length)):  # else it chooses better anew
            predicted = self._predict_edit(request, edit, plan.predicted)
            if pays_around(edit, plan, predicted, self._config.policy):
                plan = replace(plan, mode="full", reason=Reason("reused", edit.words), predicted=predicted)
                return plan, prefix.behind(edit, key)
        if plan.mode == "sparse":
            chosen = np.flatnonzero(likely_kept(plan)).astype(np.int32)
            edit = edits.find(request, None, chosen[chosen >= prefix.length])
            if edit is not None and edit.start >= prefix.length:
                predicted = self._predict_edit(request, edit, plan.predicted)
                if pays_around(edit, plan, predicted, self._config.policy):
                    return plan, replace(prefix, change=edit)
        return plan, prefix

    def _predict_edit(self, request: GenerationRequest, edit: Edit, planned: Prediction | None) -> Prediction | None:
        """Return the time of full reading, and of reading what an edit has to read; None if not known."""
        if planned is None:
            return None
        M = len(request.prompt)
        drafted = edit.inserted + (M - edit.length if asks_anew(request, edit.length) else 0)
        ways = self.predict(M, M - edit.read, edit.read, M - drafted)
        return replace(planned, sparse_ms=ways.sparse_ms if edit.is_sparse else ways.full_ms)


def pays_around(edit: Edit, plan: PrefillPlan, predicted: Prediction | None, policy: SpecPrefillPolicy) -> bool:
    """Return whether an edit is read soon enough: it loses less than a sparse prefill, so half the time will do, but
    where it keeps no more than a sparse prefill does.
    """
    if plan.predicted is None or predicted is None:
        return edit.reused >= edit.read
    if plan.mode == "full":
        return pays(predicted, policy)
    return predicted.sparse_ms <= max(plan.predicted.sparse_ms, 0 if edit.is_sparse else predicted.full_ms / 2)
