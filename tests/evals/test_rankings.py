"""Rankings without a draft, against brute force where there is something to compute."""

import math

import numpy as np
import pytest

from mlx_specprefill_evals import rankings
from mlx_specprefill_evals.statistics import paired_difference


def test_random_chunks_are_constant_within_a_chunk_and_differ_by_seed() -> None:
    one, other = (rankings.random_chunks(100, 32, seed) for seed in (1, 2))
    assert one.shape == (100,)
    assert all(len(set(one[start : start + 32])) == 1 for start in range(0, 100, 32))
    assert len(set(one)) == 4
    assert not np.array_equal(one, other)


def test_recency_prefers_the_end() -> None:
    assert (np.diff(rankings.by_recency(50)) > 0).all()


def test_passages_are_ranked_by_bm25_of_their_words() -> None:
    passages = ["One two THREE four.", "one, one! Seven eight", "nine nine"]
    scores = rankings.by_words(10, passages, 4, "Nine ones? Is one absent")
    mean = 10 / 3

    def bm25(times: int, holding: int, size: int) -> float:
        rarity = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
        return rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * size / mean))

    expected = [bm25(1, 2, 4), bm25(2, 2, 4), bm25(2, 1, 2)]
    np.testing.assert_allclose(scores, np.repeat(expected, 4)[:10], rtol=1e-6)


def test_gold_comes_first_with_every_chunk_that_it_touches() -> None:
    importance = rankings.gold_first(128, 32, [(30, 34)], seed=3)
    assert (importance[:64] >= 1).all()
    assert (importance[64:] < 1).all()


def test_paired_difference_by_hand() -> None:
    assert paired_difference([1, 1, 0], [1, 1, 0]) == (0, 0, 0)
    mean, low, high = paired_difference([1] * 50 + [0] * 50, [1] * 40 + [0] * 60)
    assert mean == pytest.approx(-0.1)
    # The differences are -1 with probability 0.1: standard error 0.03, so the interval is about -0.16 to -0.04.
    assert low == pytest.approx(-0.16, abs=0.02)
    assert high == pytest.approx(-0.04, abs=0.02)
