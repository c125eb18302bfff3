"""Sparse or full, decided before any work is done. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig, RuleName
from ..request import GenerationRequest, Mode, Prediction
from .cost import worthwhile
from .forced import ForcedRange, forced_mask, forced_ranges

__all__ = ["PrefillPlan", "plan_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How one prompt will be prefilled, by which rule, and the reason that its account will give.

    `keep`, `forced` (M,) and `ranges` are only meaningful in sparse mode. `predicted` is None where nothing was
    measured.
    """

    mode: Mode
    reason: str
    keep: Fraction
    forced: npt.NDArray[np.bool_]
    ranges: tuple[ForcedRange, ...] = ()
    rule: RuleName = "default"
    predicted: Prediction | None = None

    @property
    def choice(self) -> str:
        """What sparse turns of one session have in common."""
        return f"{self.keep}:{self.rule}"

    def as_full(self, reason: str) -> PrefillPlan:
        return replace(self, mode="full", reason=reason)


def plan_prefill(
    request: GenerationRequest,
    config: EngineConfig,
    *,
    sparse_refusal: str | None,
    draft_context: int | None = None,
    cached_tokens: int = 0,
    predict: Callable[[int], Prediction] | None = None,
) -> PrefillPlan:
    """Decide from the request, the server's policy and what the pair can do.

    Args:
        sparse_refusal: why this pair can't be prefilled sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; the threshold looks at the rest.
        predict: what both ways would take if the target saw that many tokens of the rest; None: nothing was measured.
    """
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    keep = options.keep_pct if options.keep_pct is not None else policy.keep_pct
    rule = options.rule or config.rule
    ranges = tuple(forced_ranges(request.spans, M, config.selection_by(rule)))
    forced = forced_mask(ranges, M)
    predicted = predict(_kept(keep, forced[cached_tokens:])) if predict is not None else None
    plan = PrefillPlan("sparse", "requested", keep, forced, ranges, rule, predicted)
    refusal = _refused(request, sparse_refusal) or _too_long(M, draft_context)
    if options.enabled is False:
        return plan.as_full("turned off by the request")
    if refusal is not None:
        return plan.as_full(refusal)
    if options.enabled is None:
        if not policy.enabled:
            return plan.as_full("off by server policy")
        plan = _by_policy(plan, config, M - cached_tokens)
    return _possible(plan, config) if plan.mode == "sparse" else plan


def _by_policy(plan: PrefillPlan, config: EngineConfig, uncached: int) -> PrefillPlan:
    """What the server does by itself: by predicted times where they are known, else by length."""
    policy, predicted = config.policy, plan.predicted
    if policy.threshold is None and predicted is not None:
        times = f"predicted {predicted.sparse_ms / 1e3:.2f} s sparse, {predicted.full_ms / 1e3:.2f} s full"
        pays = worthwhile(predicted, policy)
        return replace(plan, reason=times) if pays else plan.as_full(f"{times}: too little to gain")
    reason = f"{uncached} uncached prompt tokens, threshold {policy.long_prompt}"
    return replace(plan, reason=reason) if uncached > policy.long_prompt else plan.as_full(reason)


def _kept(keep: Fraction, forced: npt.NDArray[np.bool_]) -> int:
    """About how many tokens a selection keeps: its share, but half of that at least beside what is forced."""
    share = float(keep) * forced.size
    return int(min(forced.size, max(share, forced.sum() + share / 2)))


def _refused(request: GenerationRequest, sparse_refusal: str | None) -> str | None:
    if sparse_refusal is not None:
        return sparse_refusal
    if request.prompt_logprobs is not None:
        return "prompt log-probabilities need the logits of every token"
    return None


def _too_long(prompt_len: int, draft_context: int | None) -> str | None:
    if draft_context is not None and prompt_len > draft_context:
        return f"the prompt has {prompt_len} tokens, the draft's context {draft_context}"
    return None


def _possible(plan: PrefillPlan, config: EngineConfig) -> PrefillPlan:
    if plan.keep == 1:
        return plan.as_full("keep is 100 %")
    share = Fraction(int(plan.forced.sum()), plan.forced.size)
    limit = config.selection.max_forced_share
    if share > limit:
        return plan.as_full(f"forced tokens are {float(share):.0%} of the prompt, limit {float(limit):.0%}")
    return plan
