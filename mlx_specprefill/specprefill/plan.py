"""Sparse or full, decided before any work is done. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig, RuleName, Scope
from ..request import GenerationRequest, Mode, Prediction
from .forced import ForcedRange, forced_mask, forced_ranges

__all__ = ["PrefillPlan", "plan_prefill"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How one prompt will be prefilled, by which rule, and the reason that its account will give.

    `keep`, `forced` (M,) and `ranges` are only meaningful in sparse mode. `predicted` is None where nothing was
    measured. `scope` is what competes.
    """

    mode: Mode
    reason: str
    keep: Fraction
    forced: Bools
    ranges: tuple[ForcedRange, ...] = ()
    rule: RuleName = "default"
    predicted: Prediction | None = None
    scope: Scope = "user"

    @property
    def choice(self) -> str:
        """What sparse turns of one session have in common."""
        return f"{self.keep}:{self.rule}:{self.scope}"

    def as_full(self, reason: str) -> PrefillPlan:
        return replace(self, mode="full", reason=reason)


def plan_prefill(
    request: GenerationRequest,
    config: EngineConfig,
    *,
    sparse_refusal: str | None,
    draft_context: int | None = None,
    cached_tokens: int | None = 0,
    predict: Callable[[int], Prediction] | None = None,
) -> PrefillPlan:
    """Decide from the request, the server's policy and what the pair can do.

    Args:
        sparse_refusal: why this pair can't be prefilled sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; all else looks at the rest. None: not known yet.
            The plan is then sparse if it could become so: all that is forced may be cached.
        predict: what both ways would take if the target saw that many tokens of the rest; None: nothing was measured.
    """
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    keep = options.keep_pct if options.keep_pct is not None else policy.keep_pct
    rule, scope = options.rule or config.rule, options.scope or policy.scope
    ranges = tuple(forced_ranges(request.spans, M, config.selection_by(rule), scope))
    forced = forced_mask(ranges, M)
    rest = np.zeros(M, dtype=np.bool_) if cached_tokens is None else forced[cached_tokens:]
    predicted = None if predict is None else predict(_kept(keep, rest))
    plan = PrefillPlan("sparse", "requested", keep, forced, ranges, rule, predicted, scope)
    refusal = _refused(request, sparse_refusal) or _too_long(M, draft_context)
    if options.enabled is False:
        return plan.as_full("turned off by the request")
    if refusal is not None:
        return plan.as_full(refusal)
    if options.enabled is None:
        plan = _by_policy(plan, config, rest.size)
    return _possible(plan, config, rest) if plan.mode == "sparse" else plan


def _by_policy(plan: PrefillPlan, config: EngineConfig, uncached: int) -> PrefillPlan:
    """What the server does by itself: by predicted times where they are known, else by length."""
    policy, predicted = config.policy, plan.predicted
    if not policy.enabled:
        return plan.as_full("off by server policy")
    if policy.threshold is None and predicted is not None:
        times = f"predicted {predicted.sparse_ms / 1e3:.2f} s sparse, {predicted.full_ms / 1e3:.2f} s full"
        return replace(plan, reason=times) if predicted.pays(policy) else plan.as_full(f"{times}: too little to gain")
    reason = f"{uncached} uncached prompt tokens, threshold {policy.long_prompt}"
    return replace(plan, reason=reason) if uncached > policy.long_prompt else plan.as_full(reason)


def _kept(keep: Fraction, forced: Bools) -> int:
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


def _possible(plan: PrefillPlan, config: EngineConfig, rest: Bools) -> PrefillPlan:
    """What is cached need not be dropped: only the `rest` of what is forced is looked at."""
    if plan.keep == 1:
        return plan.as_full("keep is 100 %")
    share = Fraction(int(rest.sum()), max(rest.size, 1))
    limit = config.selection.max_forced_share
    if share > limit:
        of = "the prompt" if rest.size == plan.forced.size else f"{rest.size} uncached tokens"
        return plan.as_full(f"forced tokens are {float(share):.0%} of {of}, limit {float(limit):.0%}")
    return plan
