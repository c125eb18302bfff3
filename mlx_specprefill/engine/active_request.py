"""One request in work: the way that it takes, what each stage has found, its times, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ..cache.prefix.nodes import CacheHit
from ..constraints import GrammarState
from ..events import TokenEvent, noop
from ..prefill_report import PrefillReport, PrefixMiss, Reached, Reason, ReportedMode, ScorerKind, Stage, Timings
from ..request import GenerationRequest, TokenIds
from ..specprefill.plan import PrefillPlan
from ..specprefill.selector import kept_spans
from .caches import EngineCaches
from .speculation import AnswerDrafter

NO_INDICES: TokenIds = np.zeros(0, dtype=np.int32)


Way = Literal["full", "extend", "sparse"]
"""The tokens that the target reads: all behind a dense prefix, all behind a sparse one, or the kept ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The cached prefix that was found.

    Attributes:
        length: prompt tokens that it covers.
        held: their indices in a sparse one, int32, ascending; empty: it is dense.
        unread: of another prompt, that this one edits: indices in front of `length` that are to be read, ascending.
        miss: why less is cached than the cache holds; None: for no reason known.
    """

    length: int = 0
    held: TokenIds = field(default_factory=lambda: NO_INDICES)
    unread: TokenIds = field(default_factory=lambda: NO_INDICES)
    miss: PrefixMiss | None = None

    @property
    def tokens(self) -> int:
        """Return the prompt tokens that the target need not read."""
        return int(self.held.size) or self.length

    @property
    def missing(self) -> TokenIds:
        """Return the indices that a sparse one does not hold, ascending, but those that are to be read."""
        known = np.concatenate([self.held, self.unread])
        return np.setdiff1d(np.arange(self.length, dtype=np.int32), known, assume_unique=True)

    @property
    def reused(self) -> int:
        """Return the tokens that it holds behind an edit."""
        return int(np.count_nonzero(self.held > self.unread[0])) if self.unread.size else 0


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The scoring of the prompt, and the tokens that are chosen by it.

    Attributes:
        scorer, scoring: the scorer, if any, and a description of its method.
        draft_read: tokens that the draft read for it, in its own tokenizer.
        kept: prompt indices that the target sees, int32; empty: all of them.
        recalled: of these, tokens dropped by an earlier turn and read for this one.
    """

    scorer: ScorerKind | None = None
    scoring: str | None = None
    draft_read: int = 0
    kept: TokenIds = field(default_factory=lambda: NO_INDICES)
    recalled: int = 0


@dataclass(slots=True)
class Decoded:
    """The answer so far.

    Attributes:
        shift: positions minus slots that the cache can't carry itself.
    """

    tokens: list[int] = field(default_factory=list)
    shift: int = 0


@dataclass(slots=True)
class Times:
    """When things happened, in seconds of the performance counter, and the milliseconds of each stage."""

    submitted: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    spent_ms: dict[str, float] = field(default_factory=dict)

    def spend(self, stage: Stage, ms: float) -> None:
        """Add a step's own time to its stage. Other requests' time does not count."""
        self.spent_ms[stage] = self.spent_ms.get(stage, 0.0) + ms

    def note_token(self) -> None:
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token

    def timings(self) -> Timings:
        started = self.started or time.perf_counter()
        return Timings(
            queue_ms=1e3 * (started - self.submitted),
            draft_ms=self.spent_ms.get("draft", 0.0),
            select_ms=self.spent_ms.get("select", 0.0),
            prefill_ms=self.spent_ms.get("queued", 0.0) + self.spent_ms.get("prefill", 0.0),  # a prefix from disk first
            ttft_ms=1e3 * max(0.0, self.first_token - started) if self.first_token else None,
            decode_ms=1e3 * (self.last_token - self.first_token),
        )


@dataclass
class ActiveRequest:
    """State of one request. Each stage adds its part.

    Attributes:
        plan: of the prefill. `Engine.submit` makes it, and the look-up of the cached prefix revises it.
        grammar: state of the request's grammar and budget.
        drafting: drafts the answer; None if that was not asked for.
        stage: the stage of the current step.
        prefix, way: known from the look-up on.
        cache: the target's, until a row has it.
        unstored: what is left to store for later requests, once the first token is out.
    """

    uid: int
    request: GenerationRequest
    plan: PrefillPlan
    times: Times = field(default_factory=Times)
    grammar: GrammarState | None = None
    drafting: AnswerDrafter | None = None
    stage: Stage = "queued"
    prefix: Prefix = field(default_factory=Prefix)
    way: Way | None = None
    choice: Choice = field(default_factory=Choice)
    cache: list[Any] = field(default_factory=list)
    decoded: Decoded = field(default_factory=Decoded)
    unstored: Callable[[], object] = noop

    def resume(self, hit: CacheHit) -> None:
        """Start from a cached prefix."""
        self.cache = hit.cache
        is_dense = hit.held.dense == hit.length
        self.prefix = Prefix(hit.length, NO_INDICES if is_dense else np.sort(hit.held.positions))

    def decide(self, plan: PrefillPlan) -> None:
        """Take the way that a plan allows behind the prefix that was found."""
        self.plan, self.way = plan, plan.mode
        if plan.mode == "full" and self.prefix.held.size:
            new = len(self.request.prompt) - self.prefix.length
            self.way = "extend"
            words = f"{new} new tokens are read whole behind an earlier turn: {plan.reason.words}"
            self.plan = replace(plan, reason=Reason("extended", words))

    def go_on_from(self, edited: CacheHit, unread: TokenIds, plan: PrefillPlan) -> None:
        """Take the way behind a prompt that this one edits; `unread` as in `Prefix`."""
        miss, self.plan, self.way = self.prefix.miss, plan, "extend"
        self.resume(edited)
        if miss is not None:
            kept = edited.length - int(unread[0]) - unread.size
            miss = replace(miss, read_tokens=max(miss.read_tokens - kept, 0))
        self.prefix = replace(self.prefix, unread=unread, miss=miss)

    @property
    def is_sparse(self) -> bool:
        """Return whether the target sees the prompt in part. False until its tokens are selected."""
        return self.choice.kept.size > 0

    @property
    def tokens_seen(self) -> int:
        """Return the prompt tokens that the target sees."""
        return int(self.choice.kept.size) or len(self.request.prompt)

    def store(self) -> None:
        """Run the deferred store. The cache may hold more tokens by now, but must be this request's own."""
        store, self.unstored = self.unstored, noop
        store()

    def keep(self, caches: EngineCaches, tokens: TokenIds, cache: list[Any], later: bool = False) -> None:
        """Cache what has been read, for later requests: the prompt's beginning, or the prompt and its answer.

        Args:
            later: at the next `store`, as it is now.
        """
        key = self.plan.selection_key if self.is_sparse else None
        if key is not None or not self.is_sparse:  # nothing would find a sparse one without a key
            self.unstored = caches.keep_target(tokens, cache, self.request, key, later)

    def keep_prompt(self, caches: EngineCaches, length: int, later: bool = False) -> None:
        """Cache the prompt's first `length` tokens, which the cache holds, as in `keep`."""
        self.keep(caches, self.request.prompt[:length], self.cache, later)

    @property
    def is_to_verify(self) -> bool:
        """Return whether a verdict on the answer is wanted: the prompt was read in part."""
        return self.request.specprefill.verify and self.is_sparse

    def record(self, event: TokenEvent) -> None:
        self.times.note_token()
        self.decoded.tokens.append(event.token)

    def report_given_up(self, done: Mapping[str, int]) -> PrefillReport:
        """Return the report of a request that ended before its first token: with the tokens that the target holds.

        Args:
            done: tokens read by stage.
        """
        report, held = self.report(), self.prefix.tokens + done.get("prefill", 0)
        if self.times.first_token:
            return report
        stage = self.stage if self.times.started else "queued"
        reached = Reached(stage, done.get(stage, 0) if stage == "draft" else held)
        return replace(report, kept_tokens=held, kept_share=None, kept_spans=None, reached=reached)

    @property
    def _mode(self) -> ReportedMode:
        if self.way != "extend":
            return self.plan.mode
        return "reuse" if self.prefix.unread.size else "sparse"

    def report(self) -> PrefillReport:
        M, sparse, choice = len(self.request.prompt), self.is_sparse, self.choice
        spans = kept_spans(choice.kept) if sparse else ((0, M),)
        return PrefillReport(
            mode=self._mode,
            reason=self.plan.reason.words,
            reason_code=self.plan.reason.code,
            prompt_tokens=M,
            kept_tokens=self.tokens_seen,
            cached_tokens=self.prefix.tokens,
            recalled_tokens=max(choice.recalled - self.prefix.unread.size, 0),
            reused_tokens=self.prefix.reused,
            kept_share=round(self.tokens_seen / M, 6) if sparse else None,
            scorer=choice.scorer if sparse else None,
            scoring=choice.scoring if sparse else None,
            draft_tokens=choice.draft_read,
            timings=self.times.timings(),
            predicted=self.plan.predicted,
            kept_spans=spans if self.request.specprefill.return_spans else None,
            speculation=None if self.drafting is None else self.drafting.report(),
            scope=self.plan.scope if sparse else None,
            miss=self.prefix.miss,
        )
