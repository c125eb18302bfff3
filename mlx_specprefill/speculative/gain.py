"""Whether speculation pays: predicted from measured forwards and observed acceptance. Pure.

A forward of r rows on a cache of S tokens takes `base + per_token * S`; how both grow with r is measured, because it is
what decides: on Apple GPUs four rows of quantised weights cost 1.1 to 1.6 times one. With acceptance a, a proposal of
g tokens gives (1 - a^(g+1)) / (1 - a) tokens per verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import SpeculationConfig

__all__ = ["Acceptance", "DecodeCosts", "ForwardCost", "Outlook", "expected_tokens", "predicted_gain"]

_PRIOR_WEIGHT = 20.0  # judged tokens that the prior counts for
_FORGET = 0.98  # of the past, per request


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Milliseconds of one forward: without a cache, and per cached token."""

    base: float
    per_token: float

    def at(self, cached: int) -> float:
        return self.base + self.per_token * cached


@dataclass(frozen=True, slots=True)
class DecodeCosts:
    """Measured forwards of the target by their number of rows, and of the draft and the MTP head with one row."""

    target: Mapping[int, ForwardCost]
    draft: ForwardCost | None = None
    head: ForwardCost | None = None


@dataclass
class Acceptance:
    """What is known about one strategy's acceptance: a prior, and what requests showed lately."""

    prior: float
    accepted: float = 0.0
    judged: float = 0.0

    @property
    def rate(self) -> float:
        return (self.prior * _PRIOR_WEIGHT + self.accepted) / (_PRIOR_WEIGHT + self.judged)

    def add(self, accepted: int, judged: int) -> None:
        self.accepted += accepted
        self.judged += judged

    def forget(self) -> None:
        """One more request has passed, so that what was refused for its past is tried again some day."""
        self.accepted *= _FORGET
        self.judged *= _FORGET


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a prediction rests on.

    Attributes:
        context: tokens in the target's cache; `draft_context` in the draft's.
        outer: acceptance of the target's verification; `inner` that of the level below, if there is one.
    """

    context: int
    draft_context: int
    outer: float
    inner: float = 0.0


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens per verification of `gamma` proposed ones, each accepted with this probability."""
    if acceptance >= 1:
        return gamma + 1.0
    return float((1 - acceptance ** (gamma + 1)) / (1 - acceptance))


def predicted_gain(strategy: str, costs: DecodeCosts, config: SpeculationConfig, outlook: Outlook) -> float:
    """How many times faster than one token per forward."""
    plain = costs.target[1].at(outlook.context)
    small = min(config.budget, outlook.context)
    draft = 0.0 if costs.draft is None else costs.draft.at(outlook.draft_context)
    if strategy == "draft":
        gamma, proposing = config.gamma, config.gamma * draft
    elif strategy == "mtp":
        gamma, proposing = config.gamma, config.gamma * (0.0 if costs.head is None else costs.head.at(outlook.context))
    elif strategy == "retrieval":
        gamma, proposing = config.gamma2, config.gamma2 * costs.target[1].at(small) + _choosing(costs, config, outlook)
    else:
        gamma = config.gamma2
        inner = config.gamma1 * draft + costs.target[config.gamma1 + 1].at(small)
        rounds = max(1.0, gamma / expected_tokens(outlook.inner, config.gamma1))
        proposing = inner * rounds + _choosing(costs, config, outlook)
    verifying = costs.target[gamma + 1].at(outlook.context)
    return expected_tokens(outlook.outer, gamma) * plain / (proposing + verifying)


def _choosing(costs: DecodeCosts, config: SpeculationConfig, outlook: Outlook) -> float:
    """After a rejection chunks are chosen anew, by the keys of means and shortlist; keys are half of what is read."""
    rejected = 1 - outlook.outer**config.gamma2
    listed = min(config.shortlist * config.budget, outlook.context) if config.shortlist > 1 else 0
    return rejected * costs.target[1].per_token * (outlook.context / config.chunk + listed) / 2
