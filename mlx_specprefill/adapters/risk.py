"""How conservative a rule has to be for its expected loss to stay below a limit: Learn then Test (arXiv 2110.01052).

Rules are ordered from the most conservative on. Each is tested in that order, on items that had no part in making the
rules, against the hypothesis that its expected loss is above the limit; the first that can't be told from such a rule
ends the testing. The last one before it is used. Because the order was fixed beforehand, no correction for testing
several is needed: with the confidence asked for, over draws of the items, no rule whose loss is above the limit passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["binomial_tail", "fewest_items", "last_certified"]


def binomial_tail(misses: int, items: int, limit: float) -> float:
    """P(Bin(items, limit) <= misses): how likely so few misses are for a rule that misses more often than `limit`."""
    return math.fsum(math.comb(items, k) * limit**k * (1 - limit) ** (items - k) for k in range(misses + 1))


def fewest_items(limit: float, confidence: float) -> int:
    """Items without a miss that it takes to tell that less than `limit` of all are missed."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - limit))


def last_certified(misses: Sequence[int], items: int, limit: float, confidence: float) -> int | None:
    """The index of the least conservative rule whose expected loss is known to be at most `limit`; None: of none.

    Args:
        misses: items on which each rule loses something, a loss of 1; the most conservative rule first.
        items: independent draws from one distribution.
        limit: in (0, 1). `confidence` in (0, 1): the chance, over draws of the items, that the loss is within it.
    """
    last = None
    for index, missed in enumerate(misses):
        if binomial_tail(missed, items, limit) > 1 - confidence:
            break
        last = index
    return last
