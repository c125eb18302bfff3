"""Speculation must not change the distribution of the text: enumerated exactly, and sampled.

The enumeration runs the code itself (`probabilities.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from mlx_specprefill.speculative import acceptance as module
from mlx_specprefill.speculative.acceptance import Distribution, Rng, draw, verify
from tests.speculative.probabilities import enumerate_distribution, total_variation

V = 8
Rows = npt.NDArray[np.float64]


class Toy:
    """Context-dependent distributions over a toy vocabulary: target, middle and draft, each near the one above."""

    def __init__(self, seed: int, size: int = V, zeros: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.size = size
        logits = rng.normal(0, 1.5, (size + 1, size + 1, size))
        self.tables = [self._normal(logits, rng, zeros)]
        for spread in (0.5, 1.5):
            self.tables.append(self._normal(logits + rng.normal(0, spread, logits.shape), rng, zeros))

    @staticmethod
    def _normal(logits: Rows, rng: np.random.Generator, zeros: bool) -> Rows:
        distribution = np.exp(logits)
        if zeros:  # what top-k and grammars do
            distribution *= rng.random(distribution.shape) < 0.7
            distribution[..., 0] += 1e-3
        normal: Rows = distribution / distribution.sum(axis=-1, keepdims=True)
        return normal

    def distribution(self, level: int, text: Sequence[int]) -> Rows:
        before, last = ([self.size, self.size, *text])[-2:]
        row: Rows = self.tables[level][before, last]
        return row

    def drafted(self, level: int, text: Sequence[int], count: int, rng: Rng) -> tuple[list[int], list[Distribution]]:
        """`count` tokens of one level, one by one."""
        tokens: list[int] = []
        distributions: list[Distribution] = []
        for _ in range(count):
            distributions.append(self.distribution(level, [*text, *tokens]))
            tokens.append(draw(distributions[-1], rng))
        return tokens, distributions

    def verified(
        self, level: int, text: Sequence[int], proposed: tuple[list[int], list[Distribution]], rng: Rng
    ) -> tuple[list[int], list[Distribution]]:
        """Verify a proposal at one level. Return the accepted tokens and their distributions."""
        tokens, distributions = proposed
        ours: list[Distribution] = [self.distribution(level, [*text, *tokens[:i]]) for i in range(len(tokens) + 1)]
        verdict = verify(ours, distributions, tokens, rng)
        return [*tokens[: verdict.accepted], verdict.token], ours[: verdict.accepted + 1]

    def hierarchical(self, text: Sequence[int], gamma1: int, gamma2: int, rng: Rng) -> list[int]:
        """One outer round of TriForce."""
        tokens: list[int] = []
        distributions: list[Distribution] = []
        while len(tokens) < gamma2:
            so_far = [*text, *tokens]
            more, more_distributions = self.verified(1, so_far, self.drafted(2, so_far, gamma1, rng), rng)
            tokens += more
            distributions += more_distributions
        return self.verified(0, text, (tokens, distributions), rng)[0]


def first(count: int, round_: Callable[[Sequence[int], Rng], list[int]]) -> Callable[[Rng], tuple[int, ...]]:
    """A program that runs rounds until there are `count` tokens."""

    def run(rng: Rng) -> tuple[int, ...]:
        text: list[int] = []
        while len(text) < count:
            text += round_(text, rng)
        return tuple(text[:count])

    return run


def true_distribution(toy: Toy, count: int) -> dict[tuple[int, ...], float]:
    def run(rng: Rng) -> tuple[int, ...]:
        text: list[int] = []
        for _ in range(count):
            text.append(draw(toy.distribution(0, text), rng))
        return tuple(text)

    return enumerate_distribution(run)


def error(toy: Toy, count: int, round_: Callable[[Sequence[int], Rng], list[int]]) -> float:
    return total_variation(enumerate_distribution(first(count, round_)), true_distribution(toy, count))


def one_level(toy: Toy, gamma: int) -> Callable[[Sequence[int], Rng], list[int]]:
    return lambda text, rng: toy.verified(0, text, toy.drafted(1, text, gamma, rng), rng)[0]


def two_levels(toy: Toy, gamma1: int, gamma2: int) -> Callable[[Sequence[int], Rng], list[int]]:
    return lambda text, rng: toy.hierarchical(text, gamma1, gamma2, rng)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_one_level_keeps_the_distribution_exactly(seed: int, zeros: bool) -> None:
    assert error(Toy(seed, V, zeros), 2, one_level(Toy(seed, V, zeros), 1)) < 1e-12
    small = Toy(seed, 3, zeros)
    assert error(small, 3, one_level(small, 2)) < 1e-12


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("size", "gamma1", "gamma2"),
    [(3, 1, 1), (3, 1, 2), (2, 2, 2), pytest.param(2, 2, 3, marks=pytest.mark.nightly)],
)
def test_two_levels_keep_the_distribution_exactly(size: int, gamma1: int, gamma2: int, zeros: bool) -> None:
    toy = Toy(5, size, zeros)
    assert error(toy, 2, two_levels(toy, gamma1, gamma2)) < 1e-12


def test_the_whole_vocabulary_through_both_levels() -> None:
    toy = Toy(7, V)
    assert error(toy, 1, two_levels(toy, 1, 1)) < 1e-12


def test_tokens_that_were_certain_are_proposals_too() -> None:
    """N-grams are, whatever the request samples with."""
    toy = Toy(3, 4)

    def round_(text: Sequence[int], rng: Rng) -> list[int]:
        tokens: list[int] = []
        for _ in range(2):
            tokens.append(int(np.argmax(toy.distribution(1, [*text, *tokens]))))
        return toy.verified(0, text, (tokens, list(tokens)), rng)[0]

    assert error(toy, 3, round_) < 1e-12


def resample_from_the_verifier(p: Distribution, q: Distribution) -> Distribution:
    """The rejection rule of the published implementation."""
    return p


@pytest.mark.extended
def test_the_published_rejection_rule_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(5, 3)
    monkeypatch.setattr(module, "residual", resample_from_the_verifier)
    assert error(toy, 2, two_levels(toy, 1, 2)) > 0.01
    assert error(toy, 2, one_level(toy, 1)) > 0.01


# --- the parts -------------------------------------------------------------------------------------------------------


class Forbidden:
    """Temperature 0 leaves nothing to chance."""

    def bernoulli(self, probability: float) -> bool:
        assert probability in (0.0, 1.0)
        return probability == 1.0

    def categorical(self, distribution: npt.NDArray[np.float64]) -> int:
        raise AssertionError("nothing is drawn")


def test_temperature_zero_accepts_what_is_the_argmax() -> None:
    rng = Forbidden()
    assert verify([4, 5, 6], [4, 5], [4, 5], rng) == module.Verdict(2, 6)
    assert verify([4, 5, 6], [4, 7], [4, 7], rng) == module.Verdict(1, 5)
    assert verify([3], [], [], rng) == module.Verdict(0, 3)


def test_dice_never_draw_what_is_impossible() -> None:
    distribution = np.array([0.0, 0.3, 0.0, 0.7, 0.0])
    rng = Rng(4)
    counts = Counter(rng.categorical(distribution) for _ in range(4000))
    assert set(counts) == {1, 3}
    assert abs(counts[3] / 4000 - 0.7) < 0.03
    assert not rng.bernoulli(0.0)
    assert rng.bernoulli(1.0)
