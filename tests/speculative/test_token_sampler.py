"""The sampler draws from a distribution after every filter and penalty."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill import InvalidRequestError, SamplingParams
from mlx_specprefill.choosing.sampling import check_sampling, forbid_until, logits_processors, make_sampler
from mlx_specprefill.speculative.acceptance import TokenSampler
from tests.support.examples import examples

pytestmark = pytest.mark.extended

V = 40
LEAST = [5e-324, 1e-46, 1e-38, 1e-30, 1e-9, 1e-3]  # as JSON may have them; float32 has less
SHARES = st.sampled_from([0.0, *LEAST, 0.1, 0.5, 0.9, 1 - 1e-12, 1.0])  # mlx-lm's filters are compiled for each value
IDS = st.integers(0, V - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([*LEAST, 1.0]) | st.floats(0, 2, exclude_min=True),
    top_p=SHARES,
    top_k=st.sampled_from([0, 1, 5, V - 1, V, V + 2]),
    min_p=SHARES,
    repetition_penalty=st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
)
SCALES = st.sampled_from([0.0, 1e-6, 1.0, 30.0, 1e4, 1e30])


def logits(seed: int, scale: float, masked: int) -> mx.array:
    """Some of the tokens forbidden, as by a grammar."""
    rng = np.random.default_rng(seed)
    table = (rng.normal(size=(1, V)) * scale).astype(np.float32)
    table[0, rng.permutation(V)[:masked]] = -np.inf
    return mx.array(table)


def distribution_of(params: SamplingParams, table: mx.array, before: list[int]) -> Any:
    (distribution,) = TokenSampler(params, V, logits_processors(params)).distributions(table, before)
    return distribution


@settings(max_examples=examples(60))
@given(
    params=PARAMS,
    seed=st.integers(0, 9),
    scale=SCALES,
    masked=st.integers(0, V - 1),
    before=st.lists(IDS, max_size=6),
)
def test_whatever_is_asked_for_is_a_distribution(
    params: SamplingParams, seed: int, scale: float, masked: int, before: list[int]
) -> None:
    check_sampling(params, V)
    table = logits(seed, scale, masked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distribution = distribution_of(params, table, before)
    assert np.isfinite(distribution).all()
    assert distribution.min() >= 0
    assert distribution.sum() == pytest.approx(1)
    assert (distribution[np.isneginf(np.array(table)[0])] == 0).all()
    rows = table
    for process in logits_processors(params):
        rows = process(mx.array(before, dtype=mx.int32), mx.array(rows))
    assert distribution[int(make_sampler(params, V)(rows).item())] > 0


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-3, 11.0, float("nan")])
def test_penalties_that_numbers_have_no_room_for_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_penalty: Input should be"):
        check_sampling(SamplingParams(repetition_penalty=value), V)


TABLE = logits(3, 2.0, 0)
ONE = SamplingParams(temperature=1.0)


def test_what_is_forbidden_gives_way_where_nothing_is_left() -> None:
    held = forbid_until(frozenset({3, 7}), until=2)
    for left, drawn in (({3, 7}, {3, 7}), ({3, 8}, {8})):
        table = mx.where(mx.array([token in left for token in range(V)]), TABLE, -mx.inf)
        (distribution,) = TokenSampler(ONE, V, [held]).distributions(table, [])
        assert set(np.flatnonzero(distribution)) == drawn
