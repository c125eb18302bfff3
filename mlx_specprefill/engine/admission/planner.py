"""Chooses sparse or full prefill for a request on this machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...config import EngineConfig
from ...loading import ModelPair
from ...request import GenerationRequest, Prediction
from ...specprefill.plan import PrefillPlan, plan_prefill
from ..costs import CostModel

__all__ = ["Planner"]


class Planner:
    """Plans prefills, from any thread.

    Args:
        chunk_size: returns the tokens of a forward of "draft" or "prefill".
    """

    def __init__(
        self, pair: ModelPair, config: EngineConfig, costs: CostModel, chunk_size: Callable[[str], int]
    ) -> None:
        self._pair = pair
        self._config = config
        self._costs = costs
        self._chunk_size = chunk_size

    def plan(self, request: GenerationRequest, cached: int | None = None) -> PrefillPlan:
        """Plan a request. The target's cache holds its first `cached` tokens; None: not known yet."""
        return plan_prefill(
            request,
            self._config,
            sparse_refusal=self._pair.sparse_refusal,
            # The number of tokens for a draft with another tokenizer is known only after tokenizing.
            draft_context=self._pair.draft_context if self._pair.mapping is None else None,
            cached_tokens=cached,
            predict=partial(self.predict, len(request.prompt), cached or 0) if self._pair.drafted else None,
        )

    def predict(self, tokens: int, cached: int, kept: int) -> Prediction:
        """Return the times of both prefills of a prompt if the target sees `kept` of its uncached tokens.

        The draft's cache is assumed to hold the same prefix as the target's.
        """
        return self._costs.predict(tokens, kept, cached, (self._chunk_size("prefill"), self._chunk_size("draft")))
