"""Quantised KV caches: what a request gets beside others, behind a cached prefix and after a sparse prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    SpecPrefillOptions,
    TokenEvent,
    make_pair,
)
from mlx_specprefill.cache.positioned import make_positioned_cache, quantize_kv
from mlx_specprefill.config import SpecPrefillPolicy
from tests.support.autoregressive import decode
from tests.support.oracle import Case, build, masked_dense
from tests.support.rows import ROUNDED, logprob_error, tokens
from tests.support.steps import finish, prefill
from tests.support.tiny import greedy, random_prompt, tiny_pair, tokenizer

pytestmark = pytest.mark.extended

COUNT = 24
FAMILIES = {"llama": {"head_dim": 64, "hidden_size": 64}, "qwen3": {"head_dim": 32}}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> ModelPair:
    return tiny_pair(request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module", params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def engine(pair: ModelPair, bits: int) -> Iterator[Engine]:
    config = EngineConfig(
        policy=SpecPrefillPolicy(densify=False),
        prefill_step=32,
        kv_bits=bits,
        prefix_cache_bytes=1 << 26,
    )
    with Engine(pair, config) as running:
        yield running


def asked(seed: int, sparse: bool = False, length: int = 150) -> GenerationRequest:
    options = SpecPrefillOptions(enabled=sparse, return_spans=True)
    return GenerationRequest(random_prompt(length, seed), COUNT, specprefill=options, logprobs=3)


def answered(engine: Engine, request: GenerationRequest) -> tuple[list[TokenEvent], Finished]:
    *events, last = [event for event in engine.generate(request) if isinstance(event, (TokenEvent, Finished))]
    assert isinstance(last, Finished)
    return [event for event in events if isinstance(event, TokenEvent)], last


def alone(pair: ModelPair, request: GenerationRequest, bits: int) -> list[TokenEvent]:
    """The answer after a full prefill on mlx-lm's quantised cache, one token per forward."""
    cache = make_positioned_cache(pair.target)
    logits = finish(prefill(pair.target, cache, request.prompt, None, 32))
    quantised, shift = quantize_kv(cache, bits)
    return list(decode(pair.target, quantised, logits, *_greedy(), COUNT, 3, shift))


def _greedy() -> tuple[Any, Sequence[Any]]:
    return lambda scores: mx.argmax(scores, axis=-1), ()


def assert_same(ours: Sequence[TokenEvent], theirs: Sequence[TokenEvent]) -> None:
    assert tokens(ours) == tokens(theirs)
    assert logprob_error(ours, theirs) < ROUNDED


def test_answers_beside_others_are_those_alone(engine: Engine, pair: ModelPair, bits: int) -> None:
    requests = [asked(seed, length=60 + 30 * seed) for seed in range(4)]
    expected = [alone(pair, request, bits) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: answered(engine, request)[0], requests))
    for answer, right in zip(answers, expected, strict=True):
        assert_same(answer, right)


def test_a_cached_prefix_changes_nothing(engine: Engine, pair: ModelPair, bits: int) -> None:
    request = asked(7)
    first, cold = answered(engine, request)
    again, warm = answered(engine, request)
    longer = replace(request, prompt=(*request.prompt, *tokens(first), *random_prompt(40, 8)))
    turn, third = answered(engine, longer)
    assert (cold.report.cached_tokens, warm.report.cached_tokens) == (0, 149)
    assert third.report.cached_tokens == 150  # of the answer, there are only quantised keys, which are not kept
    assert_same(again, first)
    assert_same(first, alone(pair, request, bits))
    assert_same(turn, alone(pair, longer, bits))


def test_sparse_answers_are_those_of_a_masked_run(engine: Engine, pair: ModelPair, bits: int) -> None:
    """The masked run reads the whole prompt on mlx-lm's quantised caches and hides the dropped tokens. Requests run
    alone and beside others.
    """
    requests = [asked(seed, sparse=True) for seed in range(11, 14)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: answered(engine, request), requests))
    for request, (events, last) in zip(requests, answers, strict=True):
        assert last.report.mode == "sparse"
        kept = np.concatenate([np.arange(*span) for span in last.report.kept_spans]).astype(np.int32)
        assert 0 < kept.size < 150
        case = Case(np.array(request.prompt, np.int32), kept, np.array(tokens(events)[:-1], np.int32))
        truth, plain = masked_dense(pair.target, case, bits), masked_dense(pair.target, case)
        assert truth.argmax(axis=-1).tolist() == tokens(events)
        ours = np.array([event.logprob for event in events])
        rows = truth - np.log(np.exp(truth).sum(axis=-1, keepdims=True))
        # A key that lies between two steps may be rounded the other way; all of them together are what it costs.
        assert np.abs(ours - rows.max(axis=-1)).max() < 0.05 * np.abs(truth - plain)[1:].max()


@pytest.mark.parametrize("size", [16, 32])
def test_small_heads_are_quantised_in_smaller_groups_or_not_at_all(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """The answer comes in any case; the default is 64 values per group."""
    pair, request = tiny_pair("qwen3", head_dim=size), asked(1)
    with Engine(pair, EngineConfig(kv_bits=8, prefix_cache_bytes=0)) as engine:
        events, _ = answered(engine, request)
    if size == 32:
        assert_same(events, alone(pair, request, 8))
    else:
        assert "heads of 16 and 16 values can't be quantised" in caplog.text
        assert tokens(events) == greedy(pair.target, tuple(map(int, request.prompt)), COUNT)


def test_a_model_whose_attention_can_not_read_quantised_keys_answers_without(caplog: pytest.LogCaptureFixture) -> None:
    request = replace(asked(3), prompt=tuple(range(2, 60)), specprefill=SpecPrefillOptions(enabled=False))
    model = make_pair(build("gemma2"), tokenizer(), {"max_position_embeddings": 4096, "vocab_size": 64})
    config = EngineConfig(prefill_step=32)
    with Engine(model, config) as plain:
        expected, _ = answered(plain, request)
    with Engine(model, replace(config, kv_bits=8)) as engine:
        answers = [answered(engine, request)[0] for _ in range(2)]
    assert [tokens(answer) for answer in answers] == [tokens(expected)] * 2
    (said,) = (line for line in caplog.messages if "unquantised" in line)  # once
    assert "its attention can't read quantised keys and values (AttributeError" in said
