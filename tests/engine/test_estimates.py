"""Estimates in the engine: what is not read is estimated, reported, recalled, made dense, and can be turned off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, PromptSpan, SpecPrefillOptions, keep_pct
from mlx_specprefill.adapters.estimates import Estimates, Layers, StateReader, read_estimates
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.errors import LoadError
from mlx_specprefill.specprefill.estimate_fit import with_estimates
from tests.engine.test_decisions import decided, questions_of, with_heads_of
from tests.support.dense import assert_is_full_reading
from tests.support.tiny import generated, on_own_layers, random_prompt, tiny_pair

FAMILIES = ["llama", "qwen3", "gpt_oss", "qwen3_5", "nemotron_h", "own layers"]
QUIET = SpecPrefillPolicy(densify=False)


def made_pair(family: str) -> ModelPair:
    pair = on_own_layers(tiny_pair(), 2) if family == "own layers" else tiny_pair(family, family)
    return replace(pair, estimates=random_map(pair))


def random_map(pair: ModelPair, rank: int = 8) -> Estimates:
    """A map that changes what the target sees, whatever it is worth."""
    assert pair.draft is not None
    states = StateReader(pair.draft).read(mx.zeros((1, 2), dtype=mx.int32), make_prompt_cache(pair.draft))[1]
    F, made = states.shape[1], Layers(pair.target, pair.draft).made
    weights = {layer: 0.3 * mx.random.normal((rank, size)) for layer, size in made.items()}
    offsets = {layer: 0.1 * mx.random.normal((size,)) for layer, size in made.items()}
    return Estimates(mx.zeros((F,)), mx.ones((F,)), 1e9, mx.random.normal((F, rank)) / F**0.5, weights, offsets)


def asked(prompt: tuple[int, ...], tokens: int = 6, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt, tokens, specprefill=SpecPrefillOptions(True, keep_pct("0.3"), **options))


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(made_pair(request.param), EngineConfig(policy=QUIET)) as engine:
        yield engine


def test_what_is_not_read_is_estimated(engine: Engine) -> None:
    prompt = random_prompt(300)
    report = generated(engine.generate(asked(prompt)))[1].report
    assert report.mode == "sparse"
    assert report.reason_code == "requested"
    assert report.kept_tokens + report.estimated_tokens == len(prompt)
    assert report.kept_tokens < len(prompt) / 2


def test_a_request_can_do_without(engine: Engine) -> None:
    """It neither goes on from what was estimated, nor leaves anything for those that estimate."""
    prompt = random_prompt(300, 1)
    with_them, without = asked(prompt), asked(prompt, estimate=False)
    first = engine.replay(with_them, (1, 2, 3), keep=True)
    second = engine.replay(without, (1, 2, 3), keep=True)
    assert second.report.estimated_tokens == 0 == second.report.cached_tokens
    assert not np.allclose(first.logprobs, second.logprobs, atol=1e-3)
    with Engine(replace(engine.pair, estimates=None), EngineConfig(policy=QUIET)) as plain:
        assert np.allclose(plain.replay(with_them, (1, 2, 3)).logprobs, second.logprobs, atol=1e-4)


def test_the_next_turn_goes_on_from_estimates(engine: Engine) -> None:
    prompt = random_prompt(300, 2)
    tokens, _ = generated(engine.generate(asked(prompt)))
    longer = (*prompt, *tokens, *random_prompt(40, 3))
    spans = (PromptSpan("user", 0, 0, 300, 300), PromptSpan("user", 306, 306, 345, 346))
    request = replace(asked(longer), spans=spans)
    report = generated(engine.generate(request))[1].report
    assert report.mode == "sparse"
    assert report.cached_tokens > 0
    assert report.estimated_tokens > 0
    assert report.kept_tokens + report.estimated_tokens == len(longer)


def test_idle_work_reads_what_was_estimated(engine: Engine) -> None:
    with Engine(engine.pair, EngineConfig()) as dense:
        request = asked(random_prompt(260, 4))
        generated(dense.generate(request))
        assert_is_full_reading(dense, replace(request, specprefill=SpecPrefillOptions(False)))


def test_a_map_of_another_pair_is_not_used() -> None:
    pair = made_pair("llama")
    assert pair.estimates is not None
    fewer = replace(pair.estimates, offsets={1: mx.zeros((3,))})
    with Engine(replace(pair, estimates=fewer), EngineConfig(policy=QUIET)) as engine:
        report = generated(engine.generate(asked(random_prompt(300))))[1].report
        assert report.mode == "sparse"
        assert report.estimated_tokens == 0
        state = engine.prefiller.estimating.state
        assert state.state == "none"
        assert "a target with other layers" in state.words


def test_states_unlike_those_of_the_fit_stay_absent() -> None:
    pair = made_pair("llama")
    assert pair.estimates is not None
    with Engine(replace(pair, estimates=replace(pair.estimates, limit=0.0)), EngineConfig(policy=QUIET)) as engine:
        report = generated(engine.generate(asked(random_prompt(300))))[1].report
        assert report.estimated_tokens == 0
        assert report.mode == "sparse"


def test_the_server_can_do_without() -> None:
    policy = replace(QUIET, estimate=False)
    with Engine(made_pair("llama"), EngineConfig(policy=policy)) as engine:
        assert generated(engine.generate(asked(random_prompt(300))))[1].report.estimated_tokens == 0


def test_a_map_is_stored_as_it_is(tmp_path: Path) -> None:
    pair = made_pair("llama")
    pair.estimates.write(tmp_path / "map.safetensors")
    read = with_estimates(replace(pair, estimates=None), tmp_path / "map.safetensors", None).estimates
    codes = mx.random.normal((4, 8))
    for layer in pair.estimates.weights:
        assert mx.allclose(read.of_layer(layer, codes), pair.estimates.of_layer(layer, codes), atol=0.05)
    (tmp_path / "map.safetensors").write_bytes(b"no map")
    with pytest.raises(LoadError, match=r"map\.safetensors"):
        read_estimates(tmp_path / "map.safetensors")


def test_weights_of_the_map_are_counted() -> None:
    pair = made_pair("llama")
    with Engine(pair) as engine, Engine(replace(pair, estimates=None)) as plain:
        assert engine.memory.weights == plain.memory.weights + pair.estimates.nbytes


def test_of_a_text_with_questions_nothing_is_absent() -> None:
    """Questions behind a prompt see what was read and the estimates of the rest."""
    pair = with_heads_of(made_pair("llama"))
    prompt, questions = random_prompt(1200, 5), questions_of(3)
    with Engine(pair, EngineConfig(policy=QUIET)) as engine:
        sparse = SpecPrefillOptions(True, keep_pct("0.3"))
        events = list(engine.generate(GenerationRequest(prompt, 0, specprefill=sparse, questions=questions)))
        report = events[-1].report
        assert report.mode == "sparse"
        assert report.estimated_tokens > 0
        assert report.kept_tokens + report.estimated_tokens == len(prompt)
        assert all(abs(shares.sum() - 1) < 1e-4 for shares in decided(events).probabilities)
