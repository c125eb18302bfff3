"""The predicted gain of speculation, from measured forwards and observed acceptance. Pure.

A forward of r rows on a cache of S tokens takes `base + per_token * S`; how both grow with r is measured, because it is
what decides: on Apple GPUs four rows of quantised weights cost 1.1 to 1.6 times one. With acceptance a, a proposal of
g tokens gives (1 - a^(g+1)) / (1 - a) tokens per verification.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import SpeculationConfig

__all__ = ["Acceptance", "DecodeCosts", "ForwardCost", "GainInputs", "expected_tokens", "predicted_gain"]

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
    """Estimated acceptance rate of one strategy: a prior, updated by recent requests."""

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
        """Decay towards the prior, so that a refused strategy is tried again after some requests."""
        self.accepted *= _FORGET
        self.judged *= _FORGET


@dataclass(frozen=True, slots=True)
class GainInputs:
    """What a prediction depends on.

    Attributes:
        context: tokens in the target's cache; `draft_context` in the draft's.
        outer: acceptance of the target's verification; `inner` that of the level below, if there is one.
        coverage: share of rounds in which something is proposed at all.
    """

    context: int
    draft_context: int
    outer: float
    inner: float = 0.0
    coverage: float = 1.0


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Tokens per verification of `gamma` proposed ones, each accepted with this probability."""
    if acceptance >= 1:
        return gamma + 1.0
    return float((1 - acceptance ** (gamma + 1)) / (1 - acceptance))


def predicted_gain(strategy: str, costs: DecodeCosts, config: SpeculationConfig, inputs: GainInputs) -> float:
    """How many times faster than one token per forward."""
    plain = costs.target[1].at(inputs.context)
    small = min(config.budget, inputs.context)
    draft = 0.0 if costs.draft is None else costs.draft.at(inputs.draft_context)
    if strategy == "draft":
        gamma, proposing = config.gamma, config.gamma * draft
    elif strategy == "ngram":
        gamma, proposing = config.ngram, 0.0
    elif strategy == "mtp":
        gamma, proposing = config.gamma, config.gamma * (0.0 if costs.head is None else costs.head.at(inputs.context))
    elif strategy == "retrieval":
        gamma, proposing = config.gamma2, config.gamma2 * costs.target[1].at(small) + _choosing(costs, config, inputs)
    else:
        gamma = config.gamma2
        inner = config.gamma1 * draft + costs.target[config.gamma1 + 1].at(small)
        rounds = max(1.0, gamma / expected_tokens(inputs.inner, config.gamma1))
        proposing = inner * rounds + _choosing(costs, config, inputs)
    verifying = costs.target[gamma + 1].at(inputs.context)
    drafted, rest = inputs.coverage, 1 - inputs.coverage
    tokens = drafted * expected_tokens(inputs.outer, gamma) + rest
    return tokens * plain / (drafted * (proposing + verifying) + rest * plain)


def _choosing(costs: DecodeCosts, config: SpeculationConfig, inputs: GainInputs) -> float:
    """After a rejection chunks are chosen anew, by the keys of means and shortlist; keys are half of what is read."""
    rejected = 1 - inputs.outer**config.gamma2
    listed = min(config.shortlist * config.budget, inputs.context) if config.shortlist > 1 else 0
    return rejected * costs.target[1].per_token * (inputs.context / config.chunk + listed) / 2
