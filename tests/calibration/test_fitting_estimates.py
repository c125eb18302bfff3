"""The fit of estimates: it finds a linear law where there is one, and says where none helps."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import SparseUnsupportedError
from mlx_specprefill.adapters.estimates import Estimates
from mlx_specprefill.calibration import fitting_estimates
from mlx_specprefill.calibration.fitting_estimates import EstimateFit, conversations
from tests.engine.test_estimates import drafted_by_first_layers
from tests.support.tiny import tiny_pair, tokenizer


def fitted(fit: EstimateFit) -> Estimates | None:
    steps, shares = fit.steps(), []
    while True:
        try:
            shares.append(next(steps).done)
        except StopIteration as done:
            assert shares == sorted(shares)
            found: Estimates | None = done.value
            return found


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting_estimates, "_ITEM", 400)
    monkeypatch.setattr(fitting_estimates, "_HELD_OUT", 2)


def test_conversations_are_the_same_and_differ_by_seed() -> None:
    words = tokenizer()
    first, again, other = (next(conversations(words, seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_linear_law_is_found() -> None:
    """A law of low rank; the last layer has nothing to do with the states, and stays at its mean."""
    fit = EstimateFit(drafted_by_first_layers("llama"), tokens=1500, rank=8)
    rng = np.random.default_rng(0)
    laws = {n: rng.normal(size=(5, size)).astype(np.float32) for n, size in fit._layers.made.items()}
    basis = None

    def read(prompt):
        nonlocal basis
        states = rng.normal(size=(prompt.size, 32)).astype(np.float32)
        basis = rng.normal(size=(32, 5)).astype(np.float32) if basis is None else basis
        held = {n: mx.array(states @ basis @ law + 3) for n, law in laws.items()}
        last = max(held)
        held[last] = mx.array(rng.normal(size=held[last].shape).astype(np.float32))
        yield fit._progress()
        return states, held

    fit._read = read

    def ratio(found, prompts):
        yield fit._progress()
        return 0.5

    fit._ratio = ratio
    found = fitted(fit)
    assert found is not None
    states = rng.normal(size=(64, 32)).astype(np.float32)
    codes, alike = found.codes(mx.array(states))
    assert np.array(alike).all()
    for layer in sorted(laws)[:-1]:
        true = states @ basis @ laws[layer] + 3
        assert np.abs(np.array(found.of_layer(layer, codes)) - true).max() < 0.1 * np.abs(true).max()
    last = max(laws)
    assert np.abs(np.array(found.of_layer(last, codes)) - np.array(found.offsets[last])).max() == 0


def test_a_state_unlike_the_others_has_no_estimate() -> None:
    found = Estimates(mx.zeros((4,)), mx.ones((4,)), 2.0, mx.eye(4), {}, {})
    assert np.array(found.codes(mx.array([[1.0] * 4, [9.0] * 4]))[1]).tolist() == [True, False]


@pytest.mark.parametrize("pair", ["llama", "qwen3_5", "gpt_oss", "own layers"])
def test_random_models_get_a_map_only_if_it_helps(pair: str) -> None:
    found = fitted(EstimateFit(drafted_by_first_layers(pair), tokens=1200, rank=8))
    assert found is None or all(array.size for array in found.weights.values())


def test_pairs_that_can_have_none_are_refused() -> None:
    pair = drafted_by_first_layers("llama")
    for other in (tiny_pair(), replace(pair, draft=None), replace(pair, sparse_refusal="no")):
        with pytest.raises(SparseUnsupportedError):
            EstimateFit(other)
