"""The sampler draws from a distribution after every filter and penalty."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill import InvalidRequestError, SamplingParams
from mlx_specprefill.sampling import check_sampling, forbid_until, logits_processors, make_sampler
from mlx_specprefill.speculative.verification import TokenSampler
from tests.support.examples import examples

pytestmark = pytest.mark.extended

V = 40
LEAST = [5e-324, 1e-46, 1e-38, 1e-30, 1e-9, 1e-3]  # as JSON may have them; float32 has less
SHARES = st.sampled_from([0.0, *LEAST, 0.1, 0.5, 0.9, 1 - 1e-12, 1.0])  # mlx-lm's filters are compiled for each value
IDS = st.integers(0, V - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([*LEAST, 1.0, 100.0]) | st.floats(0, 2, exclude_min=True),
    top_p=SHARES,
    top_k=st.sampled_from([0, 1, 5, V - 1, V, V + 2]),
    min_p=SHARES,
    repetition_penalty=st.sampled_from([0.01, 1.0, 1e6]) | st.floats(0.01, 10),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    typical_p=SHARES,
    xtc_probability=SHARES,
    xtc_threshold=SHARES,
    xtc_special_tokens=st.lists(IDS, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.frozensets(IDS, min_size=1, max_size=3),
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


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-3, 1e7, float("nan")])
def test_penalties_that_numbers_have_no_room_for_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_penalty must be between"):
        check_sampling(SamplingParams(repetition_penalty=value), V)


TABLE = logits(3, 2.0, 0)
PLAIN = np.exp(np.array(TABLE[0], np.float64)) / np.exp(np.array(TABLE[0], np.float64)).sum()
ONE = SamplingParams(temperature=1.0)


@pytest.mark.parametrize("typical_p", [1e-12, 0.2, 0.5, 0.9, 0.999])
def test_typical_tokens_are_those_of_average_surprise(typical_p: float) -> None:
    entropy = -(PLAIN * np.log(PLAIN)).sum()
    order = np.argsort(np.abs(-np.log(PLAIN) - entropy))
    count = int((np.cumsum(PLAIN[order]) < typical_p).sum()) + 1
    distribution = distribution_of(replace(ONE, typical_p=typical_p), TABLE, [])
    assert set(np.flatnonzero(distribution)) == set(order[:count])
    assert distribution[order[:count]] == pytest.approx(PLAIN[order[:count]] / PLAIN[order[:count]].sum(), abs=1e-6)


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_top_choices_are_excluded_as_often_as_asked_for(probability: float) -> None:
    above = np.flatnonzero(PLAIN > 0.05)
    assert len(above) >= 3
    least, kept = above[np.argmin(PLAIN[above])], above[np.argmax(PLAIN[above])]
    gone = sorted(set(above) - {least, kept})
    rest = PLAIN.copy()
    rest[gone] = 0
    expected = probability * rest / rest.sum() + (1 - probability) * PLAIN
    params = replace(ONE, xtc_probability=probability, xtc_threshold=0.05, xtc_special_tokens=(int(kept),))
    assert distribution_of(params, TABLE, []) == pytest.approx(expected, abs=1e-6)
    assert distribution_of(replace(params, xtc_threshold=0.6), TABLE, []) == pytest.approx(PLAIN, abs=1e-6)


def test_only_some_tokens_are_allowed() -> None:
    distribution = distribution_of(replace(ONE, allowed_token_ids=frozenset({3, 7})), TABLE, [])
    assert set(np.flatnonzero(distribution)) == {3, 7}


def test_words_are_not_completed() -> None:
    params = replace(ONE, bad_words=((5,), (1, 2, 3), (2, 4)))
    for before, cut in (([], {5}), ([2], {4, 5}), ([1], {5}), ([9, 1, 2], {3, 4, 5}), ([1, 2, 9], {5})):
        assert set(np.flatnonzero(distribution_of(params, TABLE, before) == 0)) == cut, before


def test_what_is_forbidden_gives_way_where_nothing_is_left() -> None:
    everything = tuple((i,) for i in range(V))
    assert set(np.flatnonzero(distribution_of(replace(ONE, bad_words=everything), TABLE, []))) == set(range(V))
    held = forbid_until(frozenset({3}), until=2)
    params = replace(ONE, allowed_token_ids=frozenset({3}))
    (distribution,) = TokenSampler(params, V, [*logits_processors(params), held]).distributions(TABLE, [])
    assert set(np.flatnonzero(distribution)) == {3}


@pytest.mark.parametrize(
    ("field", "value"),
    [("allowed_token_ids", frozenset()), ("allowed_token_ids", frozenset({V})), ("bad_words", ((),)),
     ("bad_words", ((-1,),)), ("xtc_special_tokens", (V,)), ("typical_p", 1.1), ("xtc_probability", -1.0)],
)  # fmt: skip
def test_fields_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        check_sampling(replace(ONE, **{field: value}), V)
