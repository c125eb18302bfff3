"""Drafting of one answer: from the decision before its prompt is read, over the row that decodes, to the report.

A request that asks for no drafts has none of this. MLX thread only, but for `Speculator.drafter`.
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
from ..speculative.row import LastForward, Limits, SpeculativeRow
from ..speculative.strategies import StrategyName, make_proposer, refusal
from ..speculative.token_sampler import TokenSampler
from .scheduler import Scheduler

__all__ = ["AnswerDrafter", "Speculator"]

log = logging.getLogger(__name__)
_PLAIN = "autoregressive"
_SHARED = "other answers are running, and a shared forward is cheaper"
_SEEDED = "a seeded text must not depend on what else is running"


class Speculator:
    """Makes the drafters of an engine's answers.

    Args:
        scheduler: knows whether other answers are running.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, scheduler: Scheduler) -> None:
        self.pair = pair
        self.config = config.speculation
        self.quantized = config.kv_bits is not None
        self._scheduler = scheduler
        self._refusals: dict[StrategyName, str | None] = {}

    def drafter(self, request: GenerationRequest) -> AnswerDrafter | None:
        """None where neither the request nor the server asks for drafts. From any thread."""
        asked = request.specprefill.speculative or self.config.strategy
        return None if asked == "off" else AnswerDrafter(self, request, asked)

    def refusal(self, strategy: StrategyName, request: GenerationRequest) -> str | None:
        """Why an answer can't be drafted so now; None if it can."""
        if strategy not in self._refusals:
            self._refusals[strategy] = self._lasting_refusal(strategy)
        if (reason := self._refusals[strategy]) is not None:
            return reason
        if request.sampling.seed is not None and request.sampling.temperature > 0:
            return _SEEDED
        return _SHARED if self._scheduler.decoding else None

    def _lasting_refusal(self, strategy: StrategyName) -> str | None:
        """Why the strategy can't run with this pair; None if it can."""
        if self.pair.ranks is not None:
            return "the target runs on several machines"
        return refusal(strategy, self.pair.target, self.pair.proposer, self.pair.mtp, self.quantized)


class AnswerDrafter:
    """Drafts one answer, or knows why it is decoded plainly after all.

    An answer is drafted while it is the only one: a row by proposals takes forwards of its own, and a batch already
    shares the weights, which is most of what proposals save.

    Attributes:
        strategy: None decodes autoregressively.
        reason: why this strategy, or why none.
        cache, lookahead: what scoring left: the draft's cache of the prompt, and its greedy continuation.
        reader: the target's MTP head, which reads the prompt along with it.
        row: decodes, from the prefill on.
    """

    def __init__(self, speculator: Speculator, request: GenerationRequest, asked: StrategyName) -> None:
        self._speculator = speculator
        self._pair = speculator.pair
        self._request = request
        self._asked = asked
        self.strategy: StrategyName | None = None
        self.reason = "not started"
        self.cache: list[Any] | None = None
        self.lookahead: tuple[int, ...] = ()
        self.reader: PromptReader | None = None
        self.row: SpeculativeRow | None = None
        self._last: LastForward | None = None
        self._proposer: Proposer | None = None
        self._left: SpeculationReport | None = None

    def begin(self, staged: bool = False) -> bool:
        """Decide, before the target's first forward, and again if its prefill begins anew.

        Args:
            staged: the target's layers will hold different numbers of tokens.

        Returns:
            Whether the draft goes on after the prompt, so that it has to have read it.
        """
        self.strategy, self.reason = self._asked, "requested"
        self.cache, self.lookahead, self.reader, self._last = None, (), None, None
        if (refusal := self._speculator.refusal(self._asked, self._request)) is not None:
            self._decline(refusal)
        elif staged and self._asked == "mtp":
            self._decline("in a staged prefill the MTP head does not read the prompt")
        return self.strategy == "draft"

    def forward(self, fed: npt.NDArray[np.int32]) -> Callable[[], AbstractContextManager[None]]:
        """A context for each of the target's forwards over the prompt's indices `fed`: the MTP head reads along."""
        if self.strategy != "mtp":
            return nullcontext
        assert not isinstance(self._pair.mtp, str)
        self.reader = PromptReader(self._pair.mtp, self._request.prompt, fed)
        return self.reader.forward

    def last_forward(self, grammar: GrammarState | None) -> LastForward | None:
        """Stand in for the forward of the prompt's last token; see `prefill`.

        With the draft's look-ahead, where it would be proposed first anyway; unread grammars may forbid it.
        """
        if self.cache is not None and grammar is None and not self._speculator.quantized:
            self._last = LastForward(self._pair.target, self.lookahead)
        return self._last

    def end(self, cache: list[Any], kept: npt.NDArray[np.int32] | None) -> Generator[Progress, None, None]:
        """Make the proposer for a prefilled cache; whatever fails here costs the saving, never the answer."""
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
                kept=kept,
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
    ) -> SpeculativeRow | None:
        """The row that decodes the answer, if it is drafted. It owns the cache from here on.

        Args:
            model: the target, as it reads on with the cache.
            logits: of the prompt's last token, (1, V).
            shift: positions minus slots for caches that can't carry it.
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
            first=self._last,
            logprobs=request.logprobs,
            shift=shift,
        )
        return self.row

    def step(self, row: SpeculativeRow, alone: bool) -> tuple[list[TokenEvent], str | None]:
        """One step of the row: its tokens, and why it has to go on in the plain batch, if it has to."""
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
        """The answer goes on in the plain batch: nothing but the account stays."""
        self._left = replace(self.account(), reason=f"{self.reason}; then plain decoding: {why}")
        self.strategy = self.row = self.cache = self.reader = self._proposer = self._last = None

    def account(self) -> SpeculationReport:
        row = self.row
        if row is None:
            return self._left or SpeculationReport(self.strategy or _PLAIN, self.reason)
        inner = row.proposer.inner
        return SpeculationReport(
            strategy=self.strategy or _PLAIN,
            reason=self.reason,
            acceptance_rate=row.acceptance.rate,
            inner_acceptance_rate=None if inner is None else inner.rate,
            tokens_per_step=(len(row.tokens) - row.free) / row.steps if row.steps else None,
            free_tokens=row.free,
        )

    def _decline(self, reason: str) -> None:
        self.strategy, self.reason = None, reason
