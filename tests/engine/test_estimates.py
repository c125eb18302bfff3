"""Estimates in the engine: what is not read is estimated, reported, recalled, made dense, and can be turned off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, PromptSpan, SpecPrefillOptions, keep_pct
from mlx_specprefill.adapters.depth import first_layers, smallest_depth
from mlx_specprefill.adapters.estimates import Estimates, Layers, read_estimates
from mlx_specprefill.calibration.fitting_estimates import estimating_pair, with_estimates
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.errors import LoadError
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.engine.reading.test_decisions import decided, questions_of
from tests.support.dense import assert_is_full_reading
from tests.support.tiny import generated, on_own_layers, random_prompt, tiny_pair

FAMILIES = ["llama", "qwen3", "gpt_oss", "qwen3_5", "nemotron_h", "own layers"]
QUIET = SpecPrefillPolicy(densify=False, estimate=True)


def made_pair(family: str, **changes: Any) -> ModelPair:
    pair = drafted_by_first_layers(family)
    return estimating_pair(pair, replace(random_map(pair), **changes))


def drafted_by_first_layers(family: str) -> ModelPair:
    """A pair whose draft ends early, as calibrated ones do."""
    if family == "own layers":
        return on_own_layers(tiny_pair(), 2)
    pair = tiny_pair(family, family)
    assert pair.draft is not None
    return replace(pair, draft=first_layers(pair.draft, max(2, smallest_depth(pair.draft))))


def random_map(pair: ModelPair, rank: int = 8) -> Estimates:
    """A map that changes what the target sees, whatever it is worth."""
    assert pair.draft is not None
    F = pair.draft(mx.zeros((1, 2), dtype=mx.int32)).shape[-1]
    made = Layers(pair.target, pair.draft).made
    weights = {layer: 0.3 * mx.random.normal((rank, size)) for layer, size in made.items()}
    offsets = {layer: 0.1 * mx.random.normal((size,)) for layer, size in made.items()}
    return Estimates(mx.zeros((F,)), mx.ones((F,)), 1e9, mx.random.normal((F, rank)) / F**0.5, weights, offsets)


def asked(prompt: tuple[int, ...], tokens: int = 6, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt, tokens, specprefill=SpecPrefillOptions(True, keep_pct("0.3"), **options))


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(made_pair(request.param), EngineConfig(policy=QUIET)) as engine:
        yield engine


@pytest.mark.parametrize("share", ["0.1", "0.3", "0.5", "0.7"])
def test_as_many_tokens_as_are_read_are_estimated(engine: Engine, share: str) -> None:
    prompt = random_prompt(300)
    request = replace(asked(prompt), specprefill=SpecPrefillOptions(True, keep_pct(share)))
    report = generated(engine.generate(request))[1].report
    assert report.mode == "sparse"
    assert report.reason_code == "requested"
    assert report.estimated_tokens == min(report.kept_tokens, len(prompt) - report.kept_tokens)


def test_a_request_can_do_without(engine: Engine) -> None:
    """It neither goes on from what was estimated, nor leaves anything for those that estimate."""
    prompt = random_prompt(300, 1)
    with_them, without = asked(prompt), asked(prompt, estimate=False)
    first = engine.replay(with_them, (1, 2, 3), keep=True)
    second = engine.replay(without, (1, 2, 3), keep=True)
    assert second.report.estimated_tokens == 0 == second.report.cached_tokens
    assert not np.allclose(first.logprobs, second.logprobs, atol=1e-3)
    bare = replace(engine.pair, estimates=None, draft=engine.pair.draft.inner)
    with Engine(bare, EngineConfig(policy=QUIET)) as plain:
        assert np.allclose(plain.replay(with_them, (1, 2, 3)).logprobs, second.logprobs, atol=1e-4)


def test_scores_of_a_request_alone_choose(engine: Engine) -> None:
    """The draft reads for the estimates. None of its lines is kept for that."""
    importance = np.zeros(300, dtype=np.float32)
    importance[100:140] = 1
    found = []
    for estimate in (False, True):
        asking = asked(random_prompt(300, 3), importance=importance, estimate=estimate, return_spans=True)
        report = generated(engine.generate(asking))[1].report
        assert report.scorer == "request"
        found.append(report.kept_spans)
    assert found[0] == found[1]


def test_the_next_turn_goes_on_from_estimates(engine: Engine) -> None:
    prompt = random_prompt(300, 2)
    tokens, _ = generated(engine.generate(asked(prompt)))
    longer = (*prompt, *tokens, *random_prompt(40, 3))
    spans = (PromptSpan("user", 0, 0, 300, 300), PromptSpan("user", 306, 306, 345, 346))
    request = replace(asked(longer), spans=spans)
    report = generated(engine.generate(request))[1].report
    assert report.mode == "sparse"
    assert report.cached_tokens > 0
    assert 0 < report.estimated_tokens <= report.kept_tokens


def test_idle_work_reads_what_was_estimated(engine: Engine) -> None:
    with Engine(engine.pair, EngineConfig(policy=SpecPrefillPolicy(estimate=True))) as dense:
        request = asked(random_prompt(260, 4))
        generated(dense.generate(request))
        assert_is_full_reading(dense, replace(request, specprefill=SpecPrefillOptions(False)))


def test_a_map_of_another_pair_is_not_used() -> None:
    with Engine(made_pair("llama", offsets={1: mx.zeros((3,))}), EngineConfig(policy=QUIET)) as engine:
        report = generated(engine.generate(asked(random_prompt(300))))[1].report
        assert report.mode == "sparse"
        assert report.estimated_tokens == 0
        state = engine.prefiller.estimating.state
        assert state.state == "none"
        assert "a target with other layers" in state.words


def test_states_unlike_those_of_the_fit_stay_absent() -> None:
    with Engine(made_pair("llama", limit=0.0), EngineConfig(policy=QUIET)) as engine:
        report = generated(engine.generate(asked(random_prompt(300))))[1].report
        assert report.estimated_tokens == 0
        assert report.mode == "sparse"


def test_a_server_does_without_unless_it_is_told_to() -> None:
    with Engine(made_pair("llama"), EngineConfig()) as engine:
        assert generated(engine.generate(asked(random_prompt(300))))[1].report.estimated_tokens == 0
        asks = asked(random_prompt(300, 1), estimate=True)
        assert generated(engine.generate(asks))[1].report.estimated_tokens > 0


def test_a_map_is_stored_as_it_is(tmp_path: Path) -> None:
    pair = made_pair("llama")
    pair.estimates.write(tmp_path / "map.safetensors")
    read = with_estimates(drafted_by_first_layers("llama"), tmp_path / "map.safetensors", None).estimates
    codes = mx.random.normal((4, 8))
    for layer in pair.estimates.weights:
        assert mx.allclose(read.of_layer(layer, codes), pair.estimates.of_layer(layer, codes), atol=0.05)
    (tmp_path / "map.safetensors").write_bytes(b"no map")
    with pytest.raises(LoadError, match=r"map\.safetensors"):
        read_estimates(tmp_path / "map.safetensors")


def test_weights_of_the_map_are_counted() -> None:
    pair = made_pair("llama")
    with Engine(pair) as engine, Engine(drafted_by_first_layers("llama")) as plain:
        assert engine.memory.weights >= plain.memory.weights + pair.estimates.nbytes


def test_questions_behind_a_text_see_the_estimates() -> None:
    heads = DraftHeads((Head(0, 1, 0.6), Head(1, 0, 0.4)), 2, 3, {"copy": 1.0})
    pair = replace(made_pair("llama"), heads=heads)
    prompt, questions = random_prompt(1200, 5), questions_of(3)
    with Engine(pair, EngineConfig(policy=QUIET)) as engine:
        sparse = SpecPrefillOptions(True, keep_pct("0.3"))
        events = list(engine.generate(GenerationRequest(prompt, 0, specprefill=sparse, questions=questions)))
        report = events[-1].report
        assert report.mode == "sparse"
        assert 0 < report.estimated_tokens <= report.kept_tokens
        assert all(abs(shares.sum() - 1) < 1e-4 for shares in decided(events).probabilities)


def test_another_question_about_a_text_that_the_draft_has_read_finds_its_codes(engine: Engine) -> None:
    """The target read it in part for the first question, and goes on from nothing of it."""
    text = random_prompt(300, 7)
    counts = []
    for seed in (8, 9):
        prompt = (*text, *random_prompt(24, seed))
        spans = (PromptSpan("user", 0, 0, len(prompt), len(prompt)),)
        report = generated(engine.generate(replace(asked(prompt), spans=spans)))[1].report
        assert report.estimated_tokens == report.kept_tokens
        counts.append(report.draft_tokens)
    assert counts[1] < counts[0] / 2 or engine.prefiller.is_stateful  # a state that can't be cut is made anew
