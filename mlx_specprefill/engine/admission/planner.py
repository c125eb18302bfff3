"""Sparse or full, for one request on this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from ...config import EngineConfig
from ...loading import ModelPair
from ...request import GenerationRequest, Prediction
from ...specprefill.plan import PrefillPlan, plan_prefill
from .cost import PairCost
from .time_calibration import calibrated

__all__ = ["Costs", "Planner"]


class Costs:
    """What target and draft take on this machine.

    Args:
        pause: called between two measured forwards, on the MLX thread.

    Attributes:
        measured: None before `measure`, where measuring failed, and where a fixed threshold decides.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, pause: Callable[[], None] = lambda: None) -> None:
        self._pair = pair
        self._config = config
        self._pause = pause
        self.measured: PairCost | None = None
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """From any thread: end a `measure` in work, soon and without a result."""
        self._given_up.set()

    def measure(self) -> None:
        """On the MLX thread."""
        if self._config.policy.threshold is None:
            self.measured = calibrated(self._pair, self._config, self._given_up.is_set, self._pause)

    def longest_slice(self, kind: str) -> int:
        """Tokens per forward of "draft" or "prefill" above which a prompt is read more slowly, as far as is known."""
        if self.measured is None:
            return self._config.prefill_step
        target, draft = self.measured.steps(self._config.prefill_step)
        return draft if kind == "draft" else target


class Planner:
    """Plans prefills, from any thread.

    Args:
        slice_size: tokens of a forward of "draft" or "prefill", as far as is known; from any thread.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, costs: Costs, slice_size: Callable[[str], int]) -> None:
        self._pair = pair
        self._config = config
        self._costs = costs
        self._slice_size = slice_size

    def plan(self, request: GenerationRequest, cached: int | None = None) -> PrefillPlan:
        """How to prefill a request of which the target's cache holds the first `cached` tokens; None: not known yet."""
        cost = self._costs.measured
        return plan_prefill(
            request,
            self._config,
            sparse_refusal=self._pair.sparse_refusal,
            # How many tokens a draft with another tokenizer reads is known once it has them.
            draft_context=self._pair.draft_context if self._pair.mapping is None else None,
            cached_tokens=cached,
            predict=None if cost is None else partial(self._predict, cost, len(request.prompt), cached or 0),
        )

    def selects(self, new: int, wanted: int, held: int) -> bool:
        """Whether it pays to read only `wanted` of `new` tokens behind `held` others, once the draft has read them."""
        cost, policy = self._costs.measured, self._config.policy
        if cost is None:
            return new > policy.long_prompt
        step = self._slice_size("prefill")
        every, some = (cost.target.prefill_ms(tokens, held, step) for tokens in (new, wanted))
        return Prediction(every, some).pays(policy)

    def _predict(self, cost: PairCost, tokens: int, cached: int, kept: int) -> Prediction:
        """The draft's cache is taken to hold what the target's holds."""
        steps = self._slice_size("prefill"), self._slice_size("draft")
        return cost.predict(tokens, kept, cached, cached, steps)
