"""Every coin and every draw of a program branches, and each branch carries its probability."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mlx_specprefill.speculative.acceptance import Rng

T = TypeVar("T")


class Branching(Rng):
    """Takes a given path through all random choices, and remembers which choices there were."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__(None)
        self.path = list(path)
        self.weight = 1.0
        self.options: list[list[int]] = []

    def bernoulli(self, probability: float) -> bool:
        return bool(self._take([1.0 - probability, probability]))

    def categorical(self, distribution: npt.NDArray[np.float64]) -> int:
        return self._take(distribution.tolist())

    def _take(self, weights: list[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        self.options.append(possible)
        if len(self.options) > len(self.path):
            self.path.append(possible[0])
        chosen = self.path[len(self.options) - 1]
        self.weight *= weights[chosen]
        return chosen


def enumerate_distribution(program: Callable[[Rng], T]) -> dict[T, float]:
    """The distribution of what a program returns: depth first through every choice that its generator offers."""
    distribution: Counter[T] = Counter()
    path: list[int] = []
    while True:
        rng = Branching(path)
        distribution[program(rng)] += rng.weight
        path = rng.path
        while path:
            options = rng.options[len(path) - 1]
            later = [option for option in options if option > path[-1]]
            if later:
                path = [*path[:-1], later[0]]
                break
            path = path[:-1]
        else:
            return dict(distribution)


def total_variation(ours: dict[tuple[int, ...], float], truth: dict[tuple[int, ...], float]) -> float:
    return 0.5 * sum(abs(ours.get(key, 0.0) - truth.get(key, 0.0)) for key in {*ours, *truth})
