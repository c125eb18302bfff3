"""Drafts one answer: the decision before its prefill, the decoding row, the report.

A request without drafting has none of this. MLX thread only, except `Speculator.drafter`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..errors import Refused, RequestCancelled, device_error
from ..events import Progress, SpeculationReport, TokenEvent
from ..loading import ModelPair
from ..request import GenerationRequest
from ..speculative.mtp_proposer import PromptReader
from ..speculative.proposer import Proposer
from ..speculative.row import SpeculativeRow
from ..speculative.strategies import StrategyName, make_proposer, refusal

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
        self.pair = pair
        self.config = config.speculation
        self.quantized = config.kv_bits is not None
        self._is_answering = is_answering
        self._refusals: dict[StrategyName, str | None] = {}

    def refusal(self, strategy: StrategyName, request: GenerationRequest) -> str | None:
        """Return why an answer can't be drafted now; None if it can."""
        if strategy not in self._refusals:
            pair = self.pair
            self._refusals[strategy] = (
                refusal(strategy, pair.target, pair.proposer, pair.mtp, self.quantized)
                if pair.ranks is None
                else "the target runs on several machines"
            )
        if (reason := self._refusals[strategy]) is not None:
            return reason
        if request.sampling.seed is not None and request.sampling.temperature > 0:
            return _SEEDED
        return _SHARED if self._is_answering() else None


class AnswerDrafter:
    """Drafts one answer, or holds the reason for plain decoding.

    An answer is drafted only while it is alone: a row with proposals takes forwards of its own, and a batch already
    shares the weights, which is most of what proposals save.

    Attributes:
        strategy: None decodes autoregressively.
        cache: the draft's cache of the prompt; empty unless the draft proposes.
        reader: the target's MTP head, which reads the prompt along with it.
        proposer: proposes tokens behind the prefilled cache; `row` decodes with it.
    """

    strategy: StrategyName | None
    cache: list[Any]
    reader: PromptReader | None
    proposer: Proposer | None
    row: SpeculativeRow | None
    _report: SpeculationReport

    def __init__(
        self, speculator: Speculator, request: GenerationRequest, asked: StrategyName, has_room: bool = True
    ) -> None:
        """Args:
        has_room: memory was reserved for it.
        """
        self._has_room = has_room
        self._speculator = speculator
        self._pair = speculator.pair
        self._request = request
        self._asked = asked
        self._decline("not started")

    def begin(self, staged: bool = False) -> nn.Module | None:
        """Decide before the target's first forward, and again if its prefill starts anew.

        Args:
            staged: the target's layers will hold different numbers of tokens.

        Returns:
            The draft, if it proposes tokens, so that it has to read the prompt.
        """
        refusal = self._speculator.refusal(self._asked, self._request) or (None if self._has_room else _NO_ROOM)
        if staged and self._asked == "mtp":
            refusal = refusal or "in a staged prefill the MTP head does not read the prompt"
        self._decline(refusal or "requested")
        if refusal is None:
            self.strategy, self._report = self._asked, replace(self._report, strategy=self._asked)
        return self._pair.draft if self.strategy == "draft" else None

    def reading(self, model: Callable[..., mx.array], fed: npt.NDArray[np.int32]) -> Callable[..., mx.array]:
        """Return the target as a model with which the MTP head reads the prompt indices `fed` along, if it proposes."""
        head = self._pair.mtp
        if self.strategy != "mtp" or isinstance(head, Refused):
            return model
        self.reader = PromptReader(head, self._request.prompt, fed)
        return self.reader.with_target(model)

    def end(self, cache: list[Any]) -> Generator[Progress, None, None]:
        """Make the proposer for a prefilled cache. A failure costs the saving, never the answer."""
        if self.strategy is None:
            return
        try:
            self.proposer = yield from make_proposer(
                self.strategy,
                self._pair.target,
                cache,
                self._request.prompt,
                self._speculator.config,
                draft=self._pair.draft,
                draft_cache=self.cache,
                reader=self.reader,
                draft_vocab=self._pair.draft_vocab,
            )
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:
                raise
            log.exception("%s could not start", self.strategy)
            self._decline(f"{self.strategy} could not start: {type(error).__name__}: {error}")

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
        inner = row.proposer.inner
        return replace(
            self._report,
            acceptance_rate=row.acceptance.rate,
            inner_acceptance_rate=None if inner is None else inner.rate,
            tokens_per_step=len(row.tokens) / row.steps if row.steps else None,
        )

    def _decline(self, reason: str) -> None:
        """Decode plainly, and hold nothing."""
        self.strategy = self.reader = self.proposer = self.row = None
        self.cache = []
        self._report = SpeculationReport(_PLAIN, reason)
