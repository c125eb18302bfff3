"""Two arms that take turns, so that what drifts on the machine meets both alike; and what their pairs say."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = ["Comparison", "Figures", "Pairs", "Step", "median_interval", "take_turns"]

_DOUBT = 0.05

Arm = TypeVar("Arm")
Figures = Mapping[str, float]  # costs: less is better
Step = Callable[[Arm, int], Figures]
"""Measures something of an arm; both arms of a pair get the same number, and no other pair does."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure of both arms: medians, and the median of new / old over the pairs with its 95 % interval.

    The interval has no ends where there are fewer pairs than it takes.
    """

    old: float
    new: float
    ratio: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def verdict(self) -> str:
        """Whether the interval leaves no doubt about the direction."""
        if self.low is None or self.high is None:
            return "too few pairs"
        return "more" if self.low > 1 else "less" if self.high < 1 else "no difference seen"


@dataclass
class Pairs:
    """What was measured so far, by figure: old and new, taken right after each other."""

    taken: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, old: Figures, new: Figures) -> None:
        """Figures that one of the two lacks are left out."""
        for name in old.keys() & new.keys():
            self.taken.setdefault(name, []).append((old[name], new[name]))

    def compared(self) -> dict[str, Comparison]:
        return {name: _comparison(pairs) for name, pairs in self.taken.items()}


def _comparison(pairs: Sequence[tuple[float, float]]) -> Comparison:
    old, new = (statistics.median(values) for values in zip(*pairs, strict=True))
    ratios = [after / before for before, after in pairs]
    return Comparison(old, new, statistics.median(ratios), *median_interval(ratios), len(pairs))


def median_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Two of the values, between which the median lies with 95 % confidence, whatever their distribution.

    That the k smallest of n all lie above it, or the k largest below, happens as seldom as so many heads in n throws.
    It takes six values.
    """
    ordered, count = sorted(values), len(values)
    left_out = 0
    while 2 * sum(math.comb(count, heads) for heads in range(left_out + 1)) <= _DOUBT * 2**count:
        left_out += 1
    return (ordered[left_out - 1], ordered[count - left_out]) if left_out else (None, None)


def take_turns(old: Arm, new: Arm, steps: Mapping[str, Step[Arm]], turn: int, pairs: Pairs) -> None:
    """One round: every step four times, old, new, new, old, in every second round the other way round.

    Args:
        turn: number of the round, from 0.
    """
    order = (old, new, new, old) if turn % 2 == 0 else (new, old, old, new)
    for step in steps.values():
        for half in (0, 1):
            first, second = order[2 * half : 2 * half + 2]
            number = 2 * turn + half
            figures = step(first, number), step(second, number)
            pairs.add(*(figures if first is old else figures[::-1]))
