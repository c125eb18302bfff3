"""Sparse or full, decided before any work is done. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import SCOPES, EngineConfig, RuleName, Scope
from ..request import GenerationRequest, Mode, Prediction
from .forced import ForcedRange, forced_mask, forced_ranges

__all__ = ["PrefillPlan", "plan_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How one prompt will be prefilled, by which rule, and the reason that its account will give.

    `keep`, `forced` (M,) and `ranges` are only meaningful in sparse mode. `predicted` is None where nothing was
    measured. `scope` is what competes; `crowded`: full because too little of what is not cached does.
    """

    mode: Mode
    reason: str
    keep: Fraction
    forced: npt.NDArray[np.bool_]
    ranges: tuple[ForcedRange, ...] = ()
    rule: RuleName = "default"
    predicted: Prediction | None = None
    scope: Scope = "user"
    crowded: bool = False

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
    scope: Scope | None = None,
    sparse_refusal: str | None,
    draft_context: int | None = None,
    cached_tokens: int = 0,
    predict: Callable[[int], Prediction] | None = None,
) -> PrefillPlan:
    """Decide from the request, the server's policy and what the pair can do.

    Where the request and the policy leave the scope open, the narrowest one that leaves enough to choose is taken; one
    that is wider than "user" has to be worth it.

    Args:
        scope: the only one to look at; None: as the request or the policy says.
        sparse_refusal: why this pair can't be prefilled sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; the threshold looks at the rest.
        predict: what both ways would take if the target saw that many tokens of the rest; None: nothing was measured.
    """
    facts = _Facts(request, config, sparse_refusal, draft_context, cached_tokens, predict)
    given = scope or request.specprefill.scope or config.policy.scope
    plan = _plan_in(given or SCOPES[0], facts)
    if given is not None or not plan.crowded:
        return plan
    refusals: list[str] = []
    for wider in SCOPES[1:]:
        found = _plan_in(wider, facts)
        if np.array_equal(found.forced, plan.forced):
            continue  # nothing more competes
        found = _worth_it(found, facts)
        if found.mode == "sparse":
            return replace(found, reason=f"{found.reason}; scope {wider}, in scope user {plan.reason}")
        refusals.append(f"scope {wider}: {found.reason}")
    return plan.as_full("; ".join([plan.reason, *refusals]))


@dataclass(frozen=True, slots=True)
class _Facts:
    """What `plan_prefill` is given."""

    request: GenerationRequest
    config: EngineConfig
    sparse_refusal: str | None
    draft_context: int | None
    cached_tokens: int
    predict: Callable[[int], Prediction] | None


def _plan_in(scope: Scope, facts: _Facts) -> PrefillPlan:
    """The plan if that competes."""
    request, config, cached = facts.request, facts.config, facts.cached_tokens
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    keep = options.keep_pct if options.keep_pct is not None else policy.keep_pct
    rule = options.rule or config.rule
    ranges = tuple(forced_ranges(request.spans, M, config.selection_by(rule), scope))
    forced = forced_mask(ranges, M)
    predicted = facts.predict(_kept(keep, forced[cached:])) if facts.predict is not None else None
    plan = PrefillPlan("sparse", "requested", keep, forced, ranges, rule, predicted, scope=scope)
    refusal = _refused(request, facts.sparse_refusal) or _too_long(M, facts.draft_context)
    if options.enabled is False:
        return plan.as_full("turned off by the request")
    if refusal is not None:
        return plan.as_full(refusal)
    if options.enabled is None:
        if not policy.enabled:
            return plan.as_full("off by server policy")
        plan = _by_policy(plan, config, cached)
    return _possible(plan, config, cached)


def _worth_it(plan: PrefillPlan, facts: _Facts) -> PrefillPlan:
    """A part of the system text is dropped for a long wait, or for a request that wants it."""
    policy, predicted = facts.config.policy, plan.predicted
    if plan.mode == "full" or facts.request.specprefill.enabled:
        return plan
    if predicted is not None:
        saved, limit = predicted.saving_ms / 1e3, policy.long_wait_ms / 1e3
        return plan if saved >= limit else plan.as_full(f"{saved:.2f} s to gain, limit {limit:g} s")
    uncached = plan.forced.size - facts.cached_tokens
    if uncached > policy.long_wait:
        return plan
    return plan.as_full(f"{uncached} uncached prompt tokens, limit {policy.long_wait}")


def _by_policy(plan: PrefillPlan, config: EngineConfig, cached: int) -> PrefillPlan:
    """What the server does by itself: by predicted times where they are known, else by length."""
    policy, predicted = config.policy, plan.predicted
    if policy.threshold is None and predicted is not None:
        times = f"predicted {predicted.sparse_ms / 1e3:.2f} s sparse, {predicted.full_ms / 1e3:.2f} s full"
        pays = predicted.pays(policy)
        crowded = predicted.full_ms >= policy.min_saving_ms and _forced_share(plan, cached) > plan.keep
        full = replace(plan, crowded=crowded).as_full(f"{times}: too little to gain")
        return replace(plan, reason=times) if pays else full
    uncached = plan.forced.size - cached
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


def _possible(plan: PrefillPlan, config: EngineConfig, cached: int) -> PrefillPlan:
    """What is cached need not be dropped: only the rest of the prompt is looked at."""
    if plan.mode == "full":
        return plan
    if plan.keep == 1:
        return plan.as_full("keep is 100 %")
    share = _forced_share(plan, cached)
    limit = config.selection.max_forced_share
    if share > limit:
        of = "the prompt" if not cached else f"{plan.forced.size - cached} uncached tokens"
        crowded = replace(plan, crowded=True)
        return crowded.as_full(f"forced tokens are {float(share):.0%} of {of}, limit {float(limit):.0%}")
    return plan


def _forced_share(plan: PrefillPlan, cached: int) -> Fraction:
    """Of what is not cached."""
    rest = plan.forced[cached:]
    return Fraction(int(rest.sum()), max(rest.size, 1))
