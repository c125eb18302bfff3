"""Speculative sampling: verifies proposed tokens, and draws the next one (TriForce, section 4.2).

The text keeps the target's distribution. One function serves both levels of a hierarchy. A distribution is a vector of
probabilities, or, at temperature 0, a single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Distribution", "Rng", "Verdict", "acceptance", "draw", "residual", "verify"]

Probabilities = npt.NDArray[np.float64]
# Probabilities (V,), or the only possible token.
Distribution = Probabilities | int


class Rng:
    """Pseudo-random choices from a seed."""

    def __init__(self, seed: int | None) -> None:
        self._random = np.random.default_rng(seed)

    def bernoulli(self, probability: float) -> bool:
        """Return True with this probability."""
        return float(self._random.random()) < probability

    def categorical(self, distribution: Probabilities) -> int:
        """Draw a token from the distribution (V,)."""
        sums = np.cumsum(distribution)
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return min(drawn, int(np.flatnonzero(distribution)[-1]))  # the product may round up to the last sum


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` proposed tokens are kept; `token` follows them."""

    accepted: int
    token: int


def verify(p: Sequence[Distribution], q: Sequence[Distribution], proposed: Sequence[int], rng: Rng) -> Verdict:
    """Accept token i with min(1, p_i / q_i); at the first rejection draw from norm(max(0, p_i - q_i)).

    If every token is accepted, one more is drawn from the distribution after the last.

    Args:
        p: the verifying model's distributions, one more than there are proposed tokens.
        q: the distributions that the proposed tokens were drawn from.
    """
    for i, token in enumerate(proposed):
        if not rng.bernoulli(acceptance(p[i], q[i], token)):
            return Verdict(i, draw(residual(p[i], q[i]), rng))
    return Verdict(len(proposed), draw(p[len(proposed)], rng))


def draw(distribution: Distribution, rng: Rng) -> int:
    """Draw a token from the distribution."""
    return distribution if isinstance(distribution, int) else rng.categorical(distribution)


def acceptance(p: Distribution, q: Distribution, token: int) -> float:
    """Return min(1, p(token) / q(token))."""
    ours = _of(p, token)
    return min(1.0, ours / _of(q, token)) if ours > 0 else 0.0


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return norm(max(0, p - q)), the distribution after a token of q was rejected."""
    if isinstance(p, int):
        return p
    rest = p.copy()
    if isinstance(q, int):
        rest[q] = 0.0
    else:
        rest = np.maximum(rest - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else p  # equal up to rounding: a rejection then has no weight


def _of(distribution: Distribution, token: int) -> float:
    return float(distribution == token) if isinstance(distribution, int) else float(distribution[token])
