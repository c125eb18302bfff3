"""Sparse or full, decided before any work is done. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..adapters.shares import ShareCurve
from ..config import EXPECTED_AUTO, EngineConfig, RuleName
from ..request import GenerationRequest, Mode, Prediction
from .forced import ForcedRange, forced_mask, forced_ranges
from .share import Choice

__all__ = ["PrefillPlan", "plan_prefill"]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How one prompt will be prefilled, by which rule, and the reason that its account will give.

    `keep`, `forced` (M,) and `ranges` are only meaningful in sparse mode. `predicted` is None where nothing was
    measured. `multiple` is not None where `keep` is still to be chosen from the scores, by `with_choice`; until then it
    is what can be expected. `max_loss` is not None where the share is chosen per prompt, `chosen` once it was;
    `over_lines` is then that of the selection.
    """

    mode: Mode
    reason: str
    keep: Fraction
    forced: npt.NDArray[np.bool_]
    ranges: tuple[ForcedRange, ...] = ()
    rule: RuleName = "default"
    predicted: Prediction | None = None
    max_loss: float | None = None
    multiple: float | None = None
    chosen: Fraction | None = None
    over_lines: bool = False

    @property
    def choice(self) -> str:
        """What sparse turns of one session have in common."""
        return f"{self.keep if self.max_loss is None else f'auto {self.max_loss:g}'}:{self.rule}"

    def with_choice(self, choice: Choice) -> PrefillPlan:
        """The share is known: what it leaves of the plan."""
        found = replace(self, keep=choice.share, chosen=choice.share, reason=f"{self.reason}; {choice.reason}")
        return found if choice.share < 1 else replace(found, mode="full", reason=choice.reason)

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
    shares: ShareCurve | None = None,
) -> PrefillPlan:
    """Decide from the request, the server's policy and what the pair can do.

    Args:
        sparse_refusal: why this pair can't be prefilled sparsely, or None.
        draft_context: the draft's context length in tokens, None if unknown.
        cached_tokens: prompt tokens that a prefix cache already holds; the threshold looks at the rest.
        predict: what both ways would take if the target saw that many tokens of the rest; None: nothing was measured.
        shares: what the draft loses when the share is chosen per prompt; None: that is not known.
    """
    M = len(request.prompt)
    options, policy = request.specprefill, config.policy
    asked = options.keep_pct if options.keep_pct is not None else policy.keep_pct
    keep = EXPECTED_AUTO if isinstance(asked, str) else asked
    rule = options.rule or config.rule
    ranges = tuple(forced_ranges(request.spans, M, config.selection_by(rule)))
    forced = forced_mask(ranges, M)
    predicted = predict(_kept(keep, forced[cached_tokens:])) if predict is not None else None
    plan = PrefillPlan("sparse", "requested", keep, forced, ranges, rule, predicted)
    if asked == "auto":
        plan = replace(plan, max_loss=policy.max_loss if options.max_loss is None else options.max_loss)
    refusal = _refused(request, sparse_refusal) or _too_long(M, draft_context)
    if options.enabled is False:
        return plan.as_full("turned off by the request")
    if refusal is not None:
        return plan.as_full(refusal)
    if options.enabled is None:
        if not policy.enabled:
            return plan.as_full("off by server policy")
        plan = _by_policy(plan, config, M - cached_tokens)
    if plan.mode == "full":
        return plan
    own_scores = options.importance is not None
    return _possible(plan if plan.max_loss is None else _promised(plan, own_scores, shares), config)


def _by_policy(plan: PrefillPlan, config: EngineConfig, uncached: int) -> PrefillPlan:
    """What the server does by itself: by predicted times where they are known, else by length."""
    policy, predicted = config.policy, plan.predicted
    if policy.threshold is None and predicted is not None:
        times = f"predicted {predicted.sparse_ms / 1e3:.2f} s sparse, {predicted.full_ms / 1e3:.2f} s full"
        pays = predicted.pays(policy)
        return replace(plan, reason=times) if pays else plan.as_full(f"{times}: too little to gain")
    reason = f"{uncached} uncached prompt tokens, threshold {policy.long_prompt}"
    return replace(plan, reason=reason) if uncached > policy.long_prompt else plan.as_full(reason)


def _promised(plan: PrefillPlan, own_scores: bool, shares: ShareCurve | None) -> PrefillPlan:
    """By the multiple that calibration found to lose no more than is allowed; in full where none is known."""
    assert plan.max_loss is not None
    if own_scores or plan.rule != "default":
        return plan.as_full('keep "auto" was calibrated for the scores of the default rule only')
    if shares is None:
        return plan.as_full('keep "auto": what this draft loses is not known; `mlx-specprefill calibrate` measures it')
    multiple = shares.multiple(plan.max_loss)
    if multiple is None:
        return plan.as_full(f'keep "auto": {shares.refusal(plan.max_loss)}')
    return replace(plan, multiple=multiple, over_lines=shares.over_lines)


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
    if plan.mode == "full":
        return plan
    if plan.keep == 1:
        return plan.as_full("keep is 100 %")
    share = Fraction(int(plan.forced.sum()), plan.forced.size)
    limit = config.selection.max_forced_share
    if share > limit:
        return plan.as_full(f"forced tokens are {float(share):.0%} of the prompt, limit {float(limit):.0%}")
    return plan
