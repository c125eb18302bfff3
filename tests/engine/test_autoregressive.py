"""Sampling and the decode loop."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, SamplingParams, SpecPrefillOptions
from mlx_specprefill.choosing.sampling import logits_processors, make_sampler
from tests.support.tiny import VOCAB, generated, random_prompt, tiny_pair

LOGITS = mx.array(np.random.default_rng(0).normal(size=(1, 12)).astype(np.float32) * 2)


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_pair(), EngineConfig()) as running:
        yield running


def run(engine, sampling=SamplingParams(), tokens=24, **more):  # noqa: B008 - frozen
    options = SpecPrefillOptions(False)
    return generated(engine.generate(GenerationRequest(random_prompt(40), tokens, sampling, options, **more)))[0]


def draws(params, count=4000):
    sampler = make_sampler(params, 12)
    return np.bincount([int(sampler(LOGITS).item()) for _ in range(count)], minlength=12) / count


def distribution(temperature=1.0):
    weights = np.exp(np.array(LOGITS[0], dtype=np.float64) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_softmax(temperature):
    expected = distribution(temperature)
    assert np.abs(draws(SamplingParams(temperature=temperature, seed=1)) - expected).sum() / 2 < 0.04


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 3}, lambda p: set(np.argsort(-p)[:3])),
        ({"top_p": 0.0}, lambda p: {int(p.argmax())}),
        ({"min_p": 0.3}, lambda p: {i for i in range(12) if p[i] >= 0.3 * p.max()}),
        ({"top_p": 0.6}, lambda p: set(np.argsort(-p)[: int((np.cumsum(np.sort(p)[::-1]) < 0.6).sum()) + 1])),
    ],
)
def test_filters_keep_the_right_tokens(params, allowed):
    seen = set(np.flatnonzero(draws(SamplingParams(temperature=1.0, seed=2, **params), 1500)))
    assert seen == {int(i) for i in allowed(distribution())}


def test_a_seed_means_the_same_text_whatever_else_is_drawn(engine):
    sampling = SamplingParams(temperature=1.0, seed=5)
    first = run(engine, sampling)
    mx.random.seed(123)
    assert run(engine, sampling) == first
    assert run(engine, SamplingParams(temperature=1.0, seed=6)) != first


def test_without_a_seed_answers_differ(engine):
    assert run(engine, SamplingParams(temperature=2.0)) != run(engine, SamplingParams(temperature=2.0))


def test_negative_and_huge_seeds_are_fine(engine):
    for seed in (-1, 0, 2**63, 2**70):
        assert len(run(engine, SamplingParams(temperature=1.0, seed=seed), tokens=2)) == 2


def test_logit_bias_bans_and_forces(engine):
    greedy = run(engine)
    banned = run(engine, SamplingParams(logit_bias={greedy[0]: -100.0}))
    assert greedy[0] not in banned
    assert run(engine, SamplingParams(logit_bias={7: 100.0})) == [7] * 24


def test_presence_penalty_makes_tokens_new(engine):
    """A large repetition penalty must break the loop that greedy decoding of a random model falls into."""
    looped, free = run(engine, tokens=40), run(engine, SamplingParams(repetition_penalty=10), tokens=40)
    assert len(set(free)) > len(set(looped))


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_look_at_the_generated_text(name):
    (process,) = logits_processors(SamplingParams(**{name: 0.5}))
    seen = mx.array([3, 3, 5])
    changed = np.array(process(seen, mx.zeros((1, 8))))[0]
    expected = np.zeros(8)
    expected[[3, 5]] = [-1.0, -0.5] if name == "frequency_penalty" else [-0.5, -0.5]
    np.testing.assert_allclose(changed, expected)
    assert (np.array(process(mx.array([], dtype=mx.int32), mx.zeros((1, 8)))) == 0).all()


def test_logprobs_are_the_models_own(engine):
    """Penalties and temperature change what is chosen, never what is reported."""
    prompt = random_prompt(40)
    request = GenerationRequest(
        prompt,
        6,
        SamplingParams(temperature=0.7, seed=3, presence_penalty=1.5, logit_bias={4: 2.0}),
        SpecPrefillOptions(False),
        logprobs=3,
    )
    events = [event for event in engine.generate(request) if hasattr(event, "top_logprobs")]
    tokens = [event.token for event in events]
    logits = engine.pair.target(mx.array([*prompt, *tokens])[None])[0, 39:-1].astype(mx.float32)
    table = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for row, event in zip(table, events, strict=True):
        assert event.logprob == pytest.approx(row[event.token], abs=1e-4)
        assert [best.token for best in event.top_logprobs] == np.argsort(-row)[:3].tolist()
        assert [best.logprob for best in event.top_logprobs] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)


def test_more_alternatives_than_tokens(engine):
    request = GenerationRequest(random_prompt(9), 1, logprobs=VOCAB + 5, specprefill=SpecPrefillOptions(False))
    (event,) = [event for event in engine.generate(request) if hasattr(event, "top_logprobs")]
    assert len(event.top_logprobs) == VOCAB
