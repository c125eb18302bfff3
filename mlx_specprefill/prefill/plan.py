"""Sparse or full, decided before any work is done. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..request import GenerationRequest, Mode
from .forced import ForcedRange, forced_mask, forced_ranges

__all__ = ["PrefillPlan", "plan_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How one prompt will be prefilled, and the reason that its account will give.

    `keep`, `forced` (M,) and `ranges` are only meaningful in sparse mode.
    """

    mode: Mode
    reason: str
    keep: Fraction
    forced: npt.NDArray[np.bool_]
    ranges: tuple[ForcedRange, ...] = ()

    def as_full(self, reason: str) -> PrefillPlan:
        return replace(self, mode="full", reason=reason)


def plan_prefill(
    request: GenerationRequest,
    config: EngineConfig,
    *,
    sparse_refusal: str | None,
    draft_context: int | None = None,
    cached_tokens: int = 0,
) -> PrefillPlan:
    """Decide from the request, the server's policy and what the pair can do.

    Args:
        sparse_refusal: why this pair can't be prefilled sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; the threshold looks at the rest.
    """
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    keep = options.keep_pct if options.keep_pct is not None else policy.keep_pct
    ranges = tuple(forced_ranges(request.spans, M, config.selection))
    plan = PrefillPlan("sparse", "requested", keep, forced_mask(ranges, M), ranges)
    refusal = _refused(request, sparse_refusal) or _too_long(M, draft_context)
    if options.enabled is False:
        return plan.as_full("turned off by the request")
    if refusal is not None:
        return plan.as_full(refusal)
    if options.enabled is None:
        if not policy.enabled:
            return plan.as_full("off by server policy")
        if M - cached_tokens <= policy.threshold:
            return plan.as_full(f"{M - cached_tokens} uncached prompt tokens, threshold {policy.threshold}")
        plan = replace(plan, reason=f"{M - cached_tokens} uncached prompt tokens, threshold {policy.threshold}")
    return _worthwhile(plan, config)


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


def _worthwhile(plan: PrefillPlan, config: EngineConfig) -> PrefillPlan:
    if plan.keep == 1:
        return plan.as_full("keep is 100 %")
    share = Fraction(int(plan.forced.sum()), plan.forced.size)
    limit = config.selection.max_forced_share
    if share > limit:
        return plan.as_full(f"forced tokens are {float(share):.0%} of the prompt, limit {float(limit):.0%}")
    return plan
