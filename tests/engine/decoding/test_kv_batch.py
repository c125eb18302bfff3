"""Rows with quantised KV caches share a forward: each answers, and leaves behind, what it would alone."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, SpecPrefillOptions
from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.loading.footprint import cache_bytes
from tests.support.autoregressive import decode
from tests.support.oracle import build, vocabulary
from tests.support.precision import bound, numbers
from tests.support.rows import ROUNDED, Row, logprob_error, make_rows, quantised_row, together, tokens
from tests.support.tiny import CONFIGS, generated, random_prompt, tiny_model, tiny_pair

pytestmark = pytest.mark.extended

COUNT, ROWS = 24, 8
FAMILIES: dict[str, dict[str, Any]] = {"llama": {"head_dim": 64, "hidden_size": 64}, "qwen3": {"head_dim": 32}}
JOINS = (0, 0, 0, 3, 3, 7, 12, 30)
COUNTS = (COUNT, 4, 40, 17, COUNT, 30, 9, 12)


def named(name: str) -> nn.Module:
    """Return a model of `FAMILIES` with several query heads per key head, or another of the oracle's table, by name."""
    return tiny_model(name, **FAMILIES[name]) if name in FAMILIES else build(name)


def triples(cache: Sequence[Any], start: int = 0, stop: int | None = None) -> list[np.ndarray]:
    """Packed values, scales and biases of the tokens in some slots, of every layer that has them."""
    parts = [part for part in cache if hasattr(part, "bits")]
    assert parts
    return [numbers(a[..., start:stop, :]) for part in parts for array in part.keys_and_values() for a in array]


def values(cache: Sequence[Any]) -> list[np.ndarray]:
    """Return the dequantised values of the cache."""
    return [
        numbers(mx.dequantize(*array, group_size=part.group_size, bits=part.bits))
        for part in cache
        if hasattr(part, "bits")
        for array in part.keys_and_values()
    ]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_next+gqa", "jamba"])
def test_mixed_rows_answer_and_hold_what_they_do_alone(name: str, bits: int) -> None:
    """Sparse and dense ones of different lengths, which join and leave around each other."""
    model = named(name)

    def made(model: nn.Module, uid: int, row: Row) -> DecodeRow:
        return quantised_row(model, uid, row, bits)

    rows = make_rows(vocabulary(model), ROWS)
    events, removed = together(model, rows, JOINS, COUNTS, made=made)
    for uid, row in enumerate(rows):
        spec = made(model, uid, row)
        prompt = triples(spec.cache)
        slots = len(row.prompt) if row.kept is None else row.kept.size
        expected = list(decode(model, spec.cache, spec.logits, greedy, [], COUNTS[uid] + 1, 3, spec.shift))[:-1]
        assert tokens(events[uid]) == tokens(expected)
        assert logprob_error(events[uid], expected) < ROUNDED
        left = removed[uid].cache
        assert [type(part) for part in left] == [type(part) for part in spec.cache]
        for ours, theirs in zip(triples(left, stop=slots), prompt, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for mine, other in zip(values(left), values(spec.cache), strict=True):
            assert mine.shape == other.shape
            assert np.abs(mine - other).mean() < bound(1e-4, other.max())


def by_position(kind: str) -> nn.Module:
    """A model that rotates or scales by more than the offset of a row: behind 32 tokens, otherwise."""
    if kind == "dynamic":
        scaling = {"rope_type": "dynamic", "factor": 4.0}
        return tiny_model("llama", hidden_size=128, rope_scaling=scaling, max_position_embeddings=32)
    rotation = {"rope_theta": 1000.0, "rope_type": "default"}
    scaling = rotation | {"llama_4_scaling_beta": 1.0, "original_max_position_embeddings": 32}
    values = CONFIGS["llama"] | {"model_type": "ministral3", "hidden_size": 128, "head_dim": 32}
    values |= {"layer_types": ["full_attention"] * 3, "rope_parameters": scaling, "max_position_embeddings": 4096}
    module = importlib.import_module("mlx_lm.models.ministral3")
    install_patches()  # of the module, too
    mx.random.seed(3)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(values))
    mx.eval(model.eval().parameters())
    return model


@pytest.mark.parametrize("kind", ["dynamic", "scaled queries"])
def test_slots_are_not_taken_for_positions(kind: str) -> None:
    """Behind a sparse prefill the two differ: alone and together, rows answer as with plain caches."""
    model = by_position(kind)
    rows = make_rows(vocabulary(model), 4, seed=4)
    assert any(row.kept is not None for row in rows)

    def made(model: nn.Module, uid: int, row: Row) -> DecodeRow:
        return quantised_row(model, uid, row, 8)

    plain, _ = together(model, rows, [0] * 4, [4] * 4)
    for some in ([0, 1, 2, 3], [0], [1], [2], [3]):
        events, _ = together(model, [rows[uid] for uid in some], [0] * len(some), [4] * len(some), made=made)
        for number, uid in enumerate(some):
            assert logprob_error(events[number], plain[uid]) < 0.05


class Counting:
    """The rows and tokens of every forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.seen: list[tuple[int, int]] = []

    def __call__(self, inputs: mx.array, **kwargs: Any) -> mx.array:
        self.seen.append((inputs.shape[0], inputs.shape[1]))
        output: mx.array = self.model(inputs, **kwargs)
        return output


def eight_rows(model: nn.Module, bits: int) -> tuple[DecodeBatch, Counting]:
    batch = DecodeBatch(model)
    batch._model = counting = Counting(model)
    for uid, row in enumerate(make_rows(vocabulary(model), ROWS)):
        batch.add(quantised_row(model, uid, row, bits))
    return batch, counting


def test_rows_of_other_bits_share_the_forward() -> None:
    model = named("llama")
    batch, counting = eight_rows(model, 8)
    for uid, row in enumerate(make_rows(vocabulary(model), 2, seed=3)):
        batch.add(quantised_row(model, ROWS + uid, row, 4))
    assert len(batch.step()) == ROWS + 2
    assert counting.seen == [(ROWS + 2, 1)]


def test_the_plain_caches_that_were_quantised_are_let_go_of() -> None:
    """All that a batch keeps is what it says."""
    model = named("llama")
    make_rows(vocabulary(model), 1)
    before = mx.get_active_memory()
    batch, _ = eight_rows(model, 8)
    for _ in range(2):
        batch.step()
    mx.synchronize()
    (cache,) = batch.caches
    assert mx.get_active_memory() - before < cache_bytes(cache) + (128 << 10)


# --- in an engine ----------------------------------------------------------------------------------------------------


def configured(bits: int | None, **changes: Any) -> EngineConfig:
    return EngineConfig(prefill_step=32, kv_bits=bits, prefix_cache_bytes=1 << 26, **changes)


def asked(seed: int, count: int, prompt: tuple[int, ...] | None = None) -> GenerationRequest:
    prompt = random_prompt(40 + 20 * seed, seed) if prompt is None else prompt
    return GenerationRequest(prompt, count, specprefill=SpecPrefillOptions(enabled=False))


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return tiny_pair("llama", **FAMILIES["llama"])


def test_prefixes_of_rows_that_were_batched_serve_the_next_turn(pair: ModelPair) -> None:
    requests = [asked(seed, COUNT) for seed in range(4)]
    with Engine(pair, configured(8)) as engine, ThreadPoolExecutor(4) as pool:
        firsts = list(pool.map(lambda request: generated(engine.generate(request)), requests))
        turns = [
            asked(seed, COUNT, (*request.prompt, *answer, *random_prompt(30, 50 + seed)))
            for seed, (request, (answer, _)) in enumerate(zip(requests, firsts, strict=True))
        ]
        seconds = list(pool.map(lambda request: generated(engine.generate(request)), turns))
    for request, turn, (first, _), (second, end) in zip(requests, turns, firsts, seconds, strict=True):
        assert end.report.cached_tokens == len(request.prompt)
        with Engine(pair, configured(8)) as fresh:
            assert first == generated(fresh.generate(request))[0]
            assert second == generated(fresh.generate(turn))[0]
