"""One request on its way through the engine. The only mutable record; lives on the MLX thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..constraints import GrammarState
from ..loading import ModelPair
from ..request import GenerationRequest, PrefillReport, ScorerKind, Stage, Timings
from ..sessions.continuing import Continuation
from ..specprefill.plan import PrefillPlan
from ..specprefill.selector import kept_spans
from ..specprefill.staged_prefill import HiddenStates
from .speculation import AnswerDrafter
from .stats import Need

__all__ = ["Sequence"]


@dataclass
class Sequence:
    """State of one request.

    Attributes:
        plan: how the prompt is prefilled; made when the request is submitted, revised when it is known what is cached.
        need: predicted, as admission reserves it.
        cached: prompt tokens that came from the exact prefix cache (S).
        reused: prompt tokens that came from any cache: those, or what an earlier sparse turn kept.
        kept: prompt indices the target has seen, int32, or None for all of them.
        scorer, scoring: who scored the prompt, if somebody did, and how, in words.
        draft_read: tokens of the prompt that the draft read for it, its own ones.
        continuation: how a sparse prefill followed an earlier sparse turn, if it did.
        cache, shift: the target's cache once prefilled, and the shift that it can't carry itself.
        staged: the caches of the target's first layers hold more tokens than the others.
        hidden: what those layers passed on of the prompt, until the others have read it.
        stage: what the current slice works on.
        tokens: generated so far.
        grammar: the request's grammar and budget on their way through the answer.
        drafting: drafts the answer; None if that was not asked for.
        unstored: keeps the prompt for later requests, which waits until the first token is out.
    """

    uid: int
    request: GenerationRequest
    submitted: float
    grammar: GrammarState | None = None
    drafting: AnswerDrafter | None = None
    started: float = 0.0
    plan: PrefillPlan | None = None
    need: Need = field(default_factory=Need)
    cached: int = 0
    reused: int = 0
    kept: npt.NDArray[np.int32] | None = None
    scorer: ScorerKind | None = None
    scoring: str | None = None
    draft_read: int = 0
    continuation: Continuation | None = None
    cache: list[Any] = field(default_factory=list)
    shift: int = 0
    staged: bool = False
    hidden: HiddenStates | None = None
    stage: Stage = "queued"
    tokens: list[int] = field(default_factory=list)
    spent_ms: dict[str, float] = field(default_factory=dict)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    unstored: Callable[[], None] | None = None

    def store(self) -> None:
        """Keep what waits for it. The cache may hold more by now, but must be this sequence's own."""
        if self.unstored is not None:
            store, self.unstored = self.unstored, None
            store()

    def model(self, pair: ModelPair) -> Callable[..., mx.array]:
        """What reads on with the sequence's cache."""
        if not self.staged:
            return pair.target  # type: ignore[no-any-return]
        assert pair.stages is not None
        return pair.stages

    def spend(self, stage: Stage, ms: float) -> None:
        """Add a slice's own time to its stage; what other requests did in between does not count."""
        self.spent_ms[stage] = self.spent_ms.get(stage, 0.0) + ms

    def record(self, token: int) -> None:
        now = time.perf_counter()
        if not self.tokens:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.append(token)

    def account(self) -> PrefillReport:
        M = len(self.request.prompt)
        kept = M if self.kept is None else int(self.kept.size)
        spans = ((0, M),) if self.kept is None else kept_spans(self.kept)
        return PrefillReport(
            mode="full" if self.plan is None else self.plan.mode,
            reason="not started" if self.plan is None else self.plan.reason,
            prompt_tokens=M,
            kept_tokens=kept,
            cached_tokens=max(self.cached, self.reused),
            kept_share=None if self.kept is None else round(kept / M, 6),
            scorer=self.scorer if self.kept is not None else None,
            scoring=self.scoring if self.kept is not None else None,
            draft_tokens=self.draft_read,
            continuation=self.continuation,
            timings=self._timings(),
            predicted=None if self.plan is None else self.plan.predicted,
            kept_spans=spans if self.request.specprefill.return_spans else None,
            speculation=None if self.drafting is None else self.drafting.account(),
            scope=None if self.plan is None or self.kept is None else self.plan.scope,
        )

    def _timings(self) -> Timings:
        started = self.started or time.perf_counter()
        return Timings(
            queue_ms=1e3 * (started - self.submitted),
            draft_ms=self.spent_ms.get("draft", 0.0),
            select_ms=self.spent_ms.get("select", 0.0),
            prefill_ms=self.spent_ms.get("prefill", 0.0),
            ttft_ms=1e3 * max(0.0, self.first_token_at - started) if self.tokens else 0.0,
            decode_ms=1e3 * (self.last_token_at - self.first_token_at),
        )
