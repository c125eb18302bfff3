"""Drafts one answer: the decision before its prefill, the decoding row, the report.

A request without drafting has none of this. MLX thread only, except `Speculator.drafter`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from ...config import EngineConfig, SpeculationName
from ...errors import RequestCancelled, device_error
from ...events import Progress, TokenEvent
from ...pair import ModelPair
from ...prefill_report import SpeculationReport
from ...request import GenerationRequest
from ...speculative.proposer import Models, Proposer
from ...speculative.speculative_row import SpeculativeRow
from ...speculative.strategies import STRATEGIES, refusal

log = logging.getLogger(__name__)
_PLAIN = "autoregressive"
_SHARED = "other answers are running, and a shared forward is cheaper"
_SEEDED = "a seeded text must not depend on what else is running"
_NO_ROOM = "memory has no room for what proposes, beside the prompt and the answer"


class Speculator:
    """Makes the drafters of an engine's answers.

    Args:
        is_answering: returns whether other answers are running.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, is_answering: Callable[[], bool]) -> None:
        self.models = models_of(pair, config)
        self._is_answering = is_answering
        self._refusals: dict[SpeculationName, str | None] = {}

    def refusal(self, strategy: SpeculationName, request: GenerationRequest) -> str | None:
        """Return why an answer can't be drafted now; None if it can."""
        if strategy not in self._refusals:
            self._refusals[strategy] = refusal(strategy, self.models)
        if (reason := self._refusals[strategy]) is not None:
            return reason
        if request.sampling.seed is not None and request.sampling.temperature > 0:
            return _SEEDED
        return _SHARED if self._is_answering() else None

    def drafter(self, request: GenerationRequest, has_room: bool) -> AnswerDrafter | None:
        """Return what drafts the answer, if that is wanted.

        Args:
            has_room: memory was reserved for it.
        """
        strategy = request.specprefill.strategy(self.models.config)
        return AnswerDrafter(self, request, strategy, has_room) if strategy in STRATEGIES else None


def models_of(pair: ModelPair, config: EngineConfig) -> Models:
    """Return what a pair's answers are drafted with."""
    return Models(
        target=pair.target,
        draft=pair.proposer,
        config=config.speculation,
        own_parts=pair.own_parts,
        draft_vocab=pair.draft_vocab,
        quantized=config.kv_bits is not None,
        spread=pair.ranks is not None,
    )


class AnswerDrafter:
    """Drafts one answer, or holds the reason for plain decoding.

    An answer is drafted only while it is alone: a row with proposals takes forwards of its own, and a batch already
    shares the weights, which is most of what proposals save.

    Attributes:
        proposer: proposes tokens; None decodes autoregressively.
        row: decodes with it behind the prefilled cache.
    """

    proposer: Proposer | None
    row: SpeculativeRow | None
    _report: SpeculationReport

    def __init__(
        self, speculator: Speculator, request: GenerationRequest, strategy: SpeculationName, has_room: bool
    ) -> None:
        self._has_room = has_room
        self._speculator = speculator
        self._request = request
        self._strategy = strategy
        self._decline("not started")

    @property
    def caches(self) -> Sequence[Any]:
        """Return what it holds beside the target's cache."""
        return () if self.proposer is None else self.proposer.caches

    def begin(self) -> Proposer | None:
        """Decide before the target's first forward, and again if its prefill starts anew."""
        kind = STRATEGIES[self._strategy]
        refusal = self._speculator.refusal(self._strategy, self._request) or (None if self._has_room else _NO_ROOM)
        self._decline(refusal or "requested")
        if refusal is None:
            self.proposer = kind(self._speculator.models, self._request.prompt)
            self._report = replace(self._report, strategy=self._strategy)
        return self.proposer

    def end(self, cache: list[Any]) -> Generator[Progress, None, None]:
        """Start the proposer behind a prefilled cache. A failure costs the saving, never the answer."""
        if self.proposer is None:
            return
        try:
            yield from self.proposer.start(cache)
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:
                raise
            log.exception("%s could not start", self._strategy)
            self._decline(f"{self._strategy} could not start: {type(error).__name__}: {error}")

    def step(self, row: SpeculativeRow, alone: bool) -> tuple[list[TokenEvent], str | None]:
        """Step the row; return its tokens, and why it has to join the plain batch, if it has to."""
        if not alone:
            return row.leave(), _SHARED
        try:
            return row.step(), None
        except Exception as error:
            if not row.proposing or device_error(error) is not None:
                raise
            log.exception("a proposal failed")
            return row.leave(), f"a proposal failed: {type(error).__name__}: {error}"

    def leave(self, why: str) -> None:
        """Move the answer to the plain batch: only the report stays."""
        report = self.report()
        self._decline(why)
        self._report = replace(report, reason=f"{report.reason}; then plain decoding: {why}")

    def report(self) -> SpeculationReport:
        row = self.row
        if row is None:
            return self._report
        return replace(
            self._report,
            acceptance_rate=row.acceptance.rate,
            tokens_per_step=len(row.tokens) / row.steps if row.steps else None,
        )

    def _decline(self, reason: str) -> None:
        """Decode plainly, and hold nothing."""
        self.proposer = self.row = None
        self._report = SpeculationReport(_PLAIN, reason)
