"""Which proposed tokens stay, and what follows them, so that the text has the target's law (TriForce, section 4.2).

One function for both levels of a hierarchy. It touches no arrays of a model: a law is a vector of probabilities, or,
at temperature 0, the one token that has them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Dice", "Law", "RandomDice", "Verdict", "acceptance", "draw", "residual", "verify"]

Probabilities = npt.NDArray[np.float64]
# Probabilities (V,), or the token that is certain.
Law = Probabilities | int


class Dice(Protocol):
    """Where chance comes from."""

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, law: Probabilities) -> int:
        """A token of the law (V,)."""
        ...


class RandomDice:
    """Chance with a seed of its own."""

    def __init__(self, seed: int | None) -> None:
        self._random = np.random.default_rng(seed)

    def coin(self, probability: float) -> bool:
        return float(self._random.random()) < probability

    def pick(self, law: Probabilities) -> int:
        sums = np.cumsum(law)
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return min(drawn, int(np.flatnonzero(law)[-1]))  # the product may round up to the last sum


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` proposed tokens stay; `token` comes after them."""

    accepted: int
    token: int


def verify(p: Sequence[Law], q: Sequence[Law], proposed: Sequence[int], dice: Dice) -> Verdict:
    """Accept token i with min(1, p_i / q_i); at the first rejection draw from norm(max(0, p_i - q_i)).

    If every token is accepted the target's law after the last one gives a token for nothing.

    Args:
        p: the verifying model's laws, one more than there are proposed tokens.
        q: the laws that the proposed tokens were really drawn from.
    """
    for i, token in enumerate(proposed):
        if not dice.coin(acceptance(p[i], q[i], token)):
            return Verdict(i, draw(residual(p[i], q[i]), dice))
    return Verdict(len(proposed), draw(p[len(proposed)], dice))


def draw(law: Law, dice: Dice) -> int:
    """A token of the law."""
    return law if isinstance(law, int) else dice.pick(law)


def acceptance(p: Law, q: Law, token: int) -> float:
    """min(1, p(token) / q(token))."""
    ours = _of(p, token)
    return min(1.0, ours / _of(q, token)) if ours > 0 else 0.0


def residual(p: Law, q: Law) -> Law:
    """norm(max(0, p - q)): what is drawn from when a token of q was rejected."""
    if isinstance(p, int):
        return p
    rest = p.copy()
    if isinstance(q, int):
        rest[q] = 0.0
    else:
        rest = np.maximum(rest - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else p  # equal up to rounding: a rejection then has no weight


def _of(law: Law, token: int) -> float:
    return float(law == token) if isinstance(law, int) else float(law[token])
