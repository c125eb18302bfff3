"""The state of one request on the MLX thread, from its plan to its report."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..adapters.staged import StagedModel
from ..cache.prefix.nodes import CacheHit, Fed
from ..constraints import GrammarState
from ..events import PrefillReport, PrefixMiss, ScorerKind, Stage, Timings, TokenEvent, noop
from ..request import GenerationRequest, TokenIds
from ..specprefill.plan import PrefillPlan
from ..specprefill.selector import kept_spans
from ..specprefill.sparse_prefill import HiddenStates
from .caches import EngineCaches
from .speculation import AnswerDrafter

NO_INDICES: TokenIds = np.zeros(0, dtype=np.int32)


@dataclass
class Sequence:
    """State of one request.

    Attributes:
        plan: of the prefill; made when the request is submitted, revised once the cached prefix is known.
        selection_key: finds and keeps a sparse prefix; None: the prompt is read in full.
        cached: prompt tokens that a cached prefix covers.
        miss: why less of it is cached than the cache holds; None: for no reason known.
        held: prompt indices in a sparse prefix, int32, ascending; empty: it is dense.
        kept: prompt indices that the target sees, int32, once they are selected; empty: all of them.
        scorer, scoring: the scorer of the prompt, if any, and a description of its method.
        draft_read: tokens that the draft read for the prompt, in its own tokenizer.
        recalled: tokens dropped by an earlier turn and read for this one.
        cache, shift: the target's cache once prefilled, and the shift that it can't carry itself.
        staged: the target in two parts, whose first layers read the whole prompt; None: it is read in one.
        hidden: those layers' hidden states of the prompt; `hidden_parts`: of the cached prefix.
        stage: the stage of the current step.
        tokens: generated so far; `sparse_logprobs`: of each, if the answer will be verified.
        grammar: state of the request's grammar and budget.
        drafting: drafts the answer; None if that was not asked for.
        unstored: what is left to store for later requests, once the first token is out.
    """

    uid: int
    request: GenerationRequest
    plan: PrefillPlan
    submitted: float = 0.0
    grammar: GrammarState | None = None
    drafting: AnswerDrafter | None = None
    started: float = 0.0
    cached: int = 0
    miss: PrefixMiss | None = None
    selection_key: str | None = None
    held: TokenIds = field(default_factory=lambda: NO_INDICES)
    hidden_parts: Seq[tuple[int, mx.array]] = ()
    kept: TokenIds = field(default_factory=lambda: NO_INDICES)
    scorer: ScorerKind | None = None
    scoring: str | None = None
    draft_read: int = 0
    recalled: int = 0
    cache: list[Any] = field(default_factory=list)
    shift: int = 0
    staged: StagedModel | None = None
    hidden: HiddenStates = field(default_factory=HiddenStates)
    stage: Stage = "queued"
    tokens: list[int] = field(default_factory=list)
    sparse_logprobs: list[float] = field(default_factory=list)
    spent_ms: dict[str, float] = field(default_factory=dict)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    unstored: Callable[[], object] = noop

    def resume(self, hit: CacheHit) -> None:
        """Start from a cached prefix."""
        self.cached, self.cache, self.hidden_parts = hit.length, hit.cache, hit.hidden
        self.held = NO_INDICES if hit.held is None else np.sort(hit.held)

    @property
    def reads_all(self) -> bool:
        """Return whether the prompt is read in full, behind a dense prefix at most."""
        return self.plan.mode == "full" and not self.held.size

    @property
    def is_sparse(self) -> bool:
        """Return whether the target sees the prompt in part. False until its tokens are selected."""
        return self.kept.size > 0

    @property
    def tokens_seen(self) -> int:
        """Return the prompt tokens that the target sees."""
        return int(self.kept.size) or len(self.request.prompt)

    @property
    def tokens_cached(self) -> int:
        """Return the prompt tokens that the target need not read."""
        return int(self.held.size) or self.cached

    @property
    def cached_dense(self) -> int:
        """Return the tokens of the cached prefix before its first gap."""
        return Fed(self.held).dense_tokens if self.held.size else self.cached

    def store(self) -> None:
        """Run the deferred store. The cache may hold more tokens by now, but must be this sequence's own."""
        store, self.unstored = self.unstored, noop
        store()

    def keep(self, caches: EngineCaches, tokens: TokenIds, cache: list[Any], later: bool = False) -> None:
        """Cache what has been read, for later requests: the prompt's beginning, or the prompt and its answer.

        Args:
            later: at the next `store`, as it is now.
        """
        selection_key = self.selection_key if self.is_sparse else None
        if selection_key is not None or not self.is_sparse:  # nothing would find a sparse one without a key
            self.unstored = caches.keep_target(tokens, cache, self.request, selection_key, self.hidden, later)

    def keep_prompt(self, caches: EngineCaches, length: int, later: bool = False) -> None:
        """Cache the prompt's first `length` tokens, which the cache holds, as in `keep`."""
        self.keep(caches, self.request.prompt[:length], self.cache, later)

    def spend(self, stage: Stage, ms: float) -> None:
        """Add a step's own time to its stage. Other requests' time does not count."""
        self.spent_ms[stage] = self.spent_ms.get(stage, 0.0) + ms

    @property
    def is_to_verify(self) -> bool:
        """Return whether a verdict on the answer is wanted: the prompt was read in part."""
        return self.request.specprefill.verify and self.is_sparse

    @property
    def logprobs(self) -> int | None:
        """Return how many alternatives per token to report, None for no log-probabilities at all."""
        return self.request.logprobs or (0 if self.is_to_verify else self.request.logprobs)

    def record(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        if not self.tokens:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.append(event.token)
        if event.logprob is not None and self.is_to_verify:
            self.sparse_logprobs.append(event.logprob)

    def report(self) -> PrefillReport:
        M, sparse = len(self.request.prompt), self.is_sparse
        spans = kept_spans(self.kept) if sparse else ((0, M),)
        return PrefillReport(
            mode=self.plan.mode,
            reason=self.plan.reason,
            prompt_tokens=M,
            kept_tokens=self.tokens_seen,
            cached_tokens=self.tokens_cached,
            recalled_tokens=self.recalled,
            kept_share=round(self.tokens_seen / M, 6) if sparse else None,
            scorer=self.scorer if sparse else None,
            scoring=self.scoring if sparse else None,
            draft_tokens=self.draft_read,
            timings=self._timings(),
            predicted=self.plan.predicted,
            kept_spans=spans if self.request.specprefill.return_spans else None,
            speculation=None if self.drafting is None else self.drafting.report(),
            scope=self.plan.scope if sparse else None,
            miss=self.miss,
        )

    def _timings(self) -> Timings:
        started = self.started or time.perf_counter()
        return Timings(
            queue_ms=1e3 * (started - self.submitted),
            draft_ms=self.spent_ms.get("draft", 0.0),
            select_ms=self.spent_ms.get("select", 0.0),
            prefill_ms=self.spent_ms.get("queued", 0.0) + self.spent_ms.get("prefill", 0.0),  # a prefix from disk first
            ttft_ms=1e3 * max(0.0, self.first_token_at - started) if self.tokens else 0.0,
            decode_ms=1e3 * (self.last_token_at - self.first_token_at),
        )
