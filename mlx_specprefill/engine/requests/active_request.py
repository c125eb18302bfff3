"""One request in work: the way that it takes, what each stage has found, its times, and its report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...adapters.estimates import Known
from ...arrays import NO_INDICES, Indices
from ...cache.prefix.nodes import CacheHit
from ...choosing.constraints import GrammarState
from ...events import TokenEvent, noop
from ...prefill_report import PrefillReport, Reached, ReportedMode, ScorerKind, Stage, Timings
from ...request import GenerationRequest, TokenIds
from ...selection.plan import PrefillPlan
from ...selection.selector import kept_spans
from ...selection.text import PromptText
from ..prefixes.caches import EngineCaches
from ..prefixes.lookup import Prefix
from .drafting import AnswerDrafter

NO_TEXT = PromptText(NO_INDICES)


@dataclass(frozen=True, slots=True)
class Scored:
    """The scoring of the prompt.

    Attributes:
        scorer, scoring: the scorer, if any, and a description of its method.
        draft_read: tokens that the draft read for it, in its own tokenizer.
        places: as in `Scores`.
    """

    scorer: ScorerKind | None = None
    scoring: str | None = None
    draft_read: int = 0
    places: Indices = field(default_factory=lambda: NO_INDICES)


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
    """The times of a request, in seconds of the performance counter, and the milliseconds of each stage."""

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
        plan: of the prefill. `Engine.submit` makes it, and the look-up of the cached prefix completes it.
        grammar: state of the request's grammar and budget.
        drafting: drafts the answer; None if that was not asked for.
        stage: the stage of the current step.
        prefix: what is cached, known from the look-up on.
        text: the prompt's lines, once they are needed.
        reading: prompt indices that the target reads, ascending, first those in front of the prefix's end; empty: they
            are not chosen yet.
        cache: the target's, until a row has it.
        known: what the draft knows of the tokens that are not read, until these are estimated.
        estimated: tokens of the prompt that the target's cache holds an estimate of.
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
    scored: Scored = field(default_factory=Scored)
    text: PromptText = NO_TEXT
    reading: Indices = field(default_factory=lambda: NO_INDICES)
    cache: list[Any] = field(default_factory=list)
    known: Known | None = None
    estimated: int = 0
    decoded: Decoded = field(default_factory=Decoded)
    unstored: Callable[[], object] = noop

    def resume(self, hit: CacheHit, reading: Indices) -> None:
        """Start from what could be restored of the prefix. What is missing of it is read, too."""
        self.cache, self.reading, planned = hit.cache, reading, self.prefix
        if hit.held.runs() != planned.held.runs():
            self.prefix = replace(planned, length=hit.length, held=hit.held, edit=None)
            self.reading = np.setdiff1d(np.union1d(planned.held.positions, reading), hit.held.positions)

    @property
    def is_sparse(self) -> bool:
        """Return whether the target sees the prompt in part. False until its tokens are chosen."""
        return self.reading.size > 0 and (self.plan.mode == "sparse" or not self.prefix.is_dense)

    @property
    def kept(self) -> Indices:
        """Return the prompt indices that the target has read, ascending, and those that an edit keeps."""
        seen: Indices = np.union1d(self.prefix.settled, self.reading)
        return seen

    @property
    def tokens_seen(self) -> int:
        """Return the prompt tokens that the target sees as they were read."""
        return self.kept.size if self.is_sparse else len(self.request.prompt)

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
        report, cached = self.report(), self.prefix.held.size if self.reading.size else 0  # else it is not restored
        if self.times.first_token:
            return report
        held = cached + done.get("prefill", 0)
        stage = self.stage if self.times.started else "queued"
        reached = Reached(stage, done.get(stage, 0) if stage == "draft" else held)
        return replace(
            report, kept_tokens=held, cached_tokens=cached, kept_share=None, kept_spans=None, reached=reached
        )

    @property
    def _mode(self) -> ReportedMode:
        if self.prefix.edit is not None:
            return "reuse"
        return self.plan.mode if self.prefix.is_dense else "sparse"

    def report(self) -> PrefillReport:
        M, sparse, scored, prefix = len(self.request.prompt), self.is_sparse, self.scored, self.prefix
        kept = self.tokens_seen
        again = int(np.count_nonzero(self.reading < prefix.length))
        spans = (kept_spans(self.kept) if sparse else ((0, M),)) if self.request.specprefill.return_spans else None
        return PrefillReport(
            mode=self._mode,
            reason=self.plan.reason.words,
            reason_code=self.plan.reason.code,
            prompt_tokens=M,
            kept_tokens=kept,
            cached_tokens=prefix.settled.size,
            estimated_tokens=self.estimated,
            recalled_tokens=max(again - prefix.unread.size, 0),
            reused_tokens=0 if prefix.edit is None else prefix.edit.reused,
            kept_share=round(kept / M, 6) if sparse else None,
            scorer=scored.scorer if sparse else None,
            scoring=scored.scoring if sparse else None,
            draft_tokens=scored.draft_read,
            timings=self.times.timings(),
            predicted=self.plan.predicted,
            kept_spans=spans,
            speculation=None if self.drafting is None else self.drafting.report(),
            scope=self.plan.scope if sparse else None,
            miss=prefix.miss,
        )
