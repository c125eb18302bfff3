"""Drafts one answer: the decision before its prefill, the decoding row, the report.

A request without drafting has none of this. MLX thread only, except `Speculator.drafter`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..constraints import GrammarState
from ..errors import RequestCancelled, device_error
from ..loading import ModelPair
from ..request import GenerationRequest, Progress, SpeculationReport, TokenEvent
from ..sampling import LogitsProcessor
from ..speculative.mtp_proposer import PromptReader
from ..speculative.proposers import Proposer
from ..speculative.row import Limits, SpeculativeRow
from ..speculative.strategies import StrategyName, make_proposer, refusal
from ..speculative.verification import TokenSampler
from .scheduler import Scheduler

log = logging.getLogger(__name__)
_PLAIN = "autoregressive"
_SHARED = "other answers are running, and a shared forward is cheaper"
_SEEDED = "a seeded text must not depend on what else is running"


class Speculator:
    """Makes the drafters of an engine's answers.

    Args:
        scheduler: tells whether other answers are running.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, scheduler: Scheduler) -> None:
        self.pair = pair
        self.config = config.speculation
        self.quantized = config.kv_bits is not None
        self._scheduler = scheduler
        self._refusals: dict[StrategyName, str | None] = {}

    def refusal(self, strategy: StrategyName, request: GenerationRequest) -> str | None:
        """Return why an answer can't be drafted now; None if it can."""
        if strategy not in self._refusals:
            self._refusals[strategy] = self._lasting_refusal(strategy)
        if (reason := self._refusals[strategy]) is not None:
            return reason
        if request.sampling.seed is not None and request.sampling.temperature > 0:
            return _SEEDED
        return _SHARED if self._scheduler.decoding else None

    def _lasting_refusal(self, strategy: StrategyName) -> str | None:
        """Return why the strategy can't run with this pair; None if it can."""
        if self.pair.ranks is not None:
            return "the target runs on several machines"
        return refusal(strategy, self.pair.target, self.pair.proposer, self.pair.mtp, self.quantized)


class AnswerDrafter:
    """Drafts one answer, or holds the reason for plain decoding.

    An answer is drafted only while it is alone: a row with proposals takes forwards of its own, and a batch already
    shares the weights, which is most of what proposals save.

    Attributes:
        strategy: None decodes autoregressively.
        reason: for the strategy, or for plain decoding.
        cache: the draft's cache of the prompt.
        reader: the target's MTP head, which reads the prompt along with it.
        row: decodes after the prefill.
    """

    def __init__(self, speculator: Speculator, request: GenerationRequest, asked: StrategyName) -> None:
        self._speculator = speculator
        self._pair = speculator.pair
        self._request = request
        self._asked = asked
        self.strategy: StrategyName | None = None
        self.reason = "not started"
        self.cache: list[Any] | None = None
        self.reader: PromptReader | None = None
        self.row: SpeculativeRow | None = None
        self._proposer: Proposer | None = None
        self._left: SpeculationReport | None = None

    def begin(self, staged: bool = False) -> bool:
        """Decide before the target's first forward, and again if its prefill starts anew.

        Args:
            staged: the target's layers will hold different numbers of tokens.

        Returns:
            True if the draft proposes tokens, so that it has to read the prompt.
        """
        self.strategy, self.reason = self._asked, "requested"
        self.cache, self.reader = None, None
        if (refusal := self._speculator.refusal(self._asked, self._request)) is not None:
            self._decline(refusal)
        elif staged and self._asked == "mtp":
            self._decline("in a staged prefill the MTP head does not read the prompt")
        return self.strategy == "draft"

    def forward(self, fed: npt.NDArray[np.int32]) -> Callable[[], AbstractContextManager[None]]:
        """Return a context for each target forward over the prompt indices `fed`, in which the MTP head reads along."""
        if self.strategy != "mtp":
            return nullcontext
        assert not isinstance(self._pair.mtp, str)
        self.reader = PromptReader(self._pair.mtp, self._request.prompt, fed)
        return self.reader.forward

    def end(self, cache: list[Any]) -> Generator[Progress, None, None]:
        """Make the proposer for a prefilled cache. A failure costs the saving, never the answer."""
        if self.strategy is None:
            return
        try:
            self._proposer = yield from make_proposer(
                self.strategy,
                self._pair.target,
                cache,
                self._request.prompt,
                self._speculator.config,
                draft=self._pair.draft,
                draft_cache=self.cache,
                reader=self.reader,
            )
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:
                raise
            log.exception("%s could not start", self.strategy)
            self._decline(f"{self.strategy} could not start: {type(error).__name__}: {error}")

    def begin_row(
        self,
        model: Callable[..., mx.array],
        cache: list[Any],
        logits: mx.array,
        processors: list[LogitsProcessor],
        grammar: GrammarState | None,
        shift: int,
        logprobs: int | None,
    ) -> SpeculativeRow | None:
        """Return the row that decodes the answer, if it is drafted. It owns the cache from here on.

        Args:
            model: the target that continues the cache.
            logits: of the prompt's last token, (1, V).
            shift: positions minus slots for caches that can't carry it.
            logprobs: None, or how many alternatives to report per token.
        """
        if self.strategy is None or self._proposer is None:
            return None
        request = self._request
        self.row = SpeculativeRow(
            model,
            cache,
            logits,
            self._proposer,
            TokenSampler(request.sampling, logits.shape[-1], processors, grammar, request.stop_token_ids),
            Limits(request.max_tokens, request.stop_token_ids),
            logprobs=logprobs,
            shift=shift,
        )
        return self.row

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
        self._left = replace(self.report(), reason=f"{self.reason}; then plain decoding: {why}")
        self.strategy = self.row = self.cache = self.reader = self._proposer = None

    def report(self) -> SpeculationReport:
        row = self.row
        if row is None:
            return self._left or SpeculationReport(self.strategy or _PLAIN, self.reason)
        inner = row.proposer.inner
        return SpeculationReport(
            strategy=self.strategy or _PLAIN,
            reason=self.reason,
            acceptance_rate=row.acceptance.rate,
            inner_acceptance_rate=None if inner is None else inner.rate,
            tokens_per_step=len(row.tokens) / row.steps if row.steps else None,
        )

    def _decline(self, reason: str) -> None:
        self.strategy, self.reason = None, reason
