"""Memory of prefills, predicted from two short forwards and compared with what MLX's allocator counts."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest
from mlx_specprefill.engine.memory.machine import default_limit
from mlx_specprefill.engine.prefixes.caches import empty_cache
from mlx_specprefill.loading import footprint
from mlx_specprefill.loading.footprint import measure_footprint
from tests.support.steps import finish, prefill
from tests.support.tiny import CONFIGS, random_prompt, tiny_model, tiny_pair

HEADS = 8
FACTOR = 0.8, 1.5  # of predicted to measured
_SHAPE = {"hidden_size": 128, "head_dim": 256, "num_attention_heads": HEADS, "intermediate_size": 256}
_HYBRID = {**CONFIGS["qwen3_5"]["text_config"], **_SHAPE}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", _SHAPE),
    "window": ("gpt_oss", {**_SHAPE, "sliding_window": 128}),
    "gated delta": ("qwen3_5", {"text_config": _HYBRID}),
    "state space": ("nemotron_h", _SHAPE),
}


def model_of(name: str) -> nn.Module:
    family, changes = MODELS[name]
    return tiny_model(family, **changes)


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """Free what earlier tests left: freed on the way, it would hide as much."""
    gc.collect()


def peak_of(model: nn.Module, tokens: int, step: int) -> int:
    cache = empty_cache(model)
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    finish(prefill(model, cache, random_prompt(tokens), None, step))
    return int(mx.get_peak_memory()) - before


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.nightly) for name in MODELS if name != "plain")]
)
def test_the_peak_of_a_prefill_is_predicted_whatever_its_length_and_step(name: str) -> None:
    """Heads of 256 have no fused kernel on most GPUs; the CPU backend has none for any size."""
    model = model_of(name)
    footprint = measure_footprint(model)
    for tokens, step in ((300, 2048), (1024, 128), (1500, 512)):
        predicted = footprint.of_held(tokens) + footprint.working(tokens, step)
        assert FACTOR[0] < predicted / peak_of(model, tokens, step) < FACTOR[1], (tokens, step)


@pytest.mark.extended
def test_scores_are_counted_where_a_kernel_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX frees on a thread of its own: on a busy machine a peak is now and then higher by some arrays."""
    model = model_of("plain")
    scores = HEADS * 4  # bytes per query row and key, float32
    assert statistics.median(measure_footprint(model).per_pair for _ in range(7)) == pytest.approx(scores, rel=0.1)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", lambda queries, *_, **__: queries)
    gc.collect()  # so that what the first measurements left is not freed within the next
    assert min(measure_footprint(model).per_pair for _ in range(15)) < scores / 10


def test_a_request_needs_more_for_the_scores_of_a_longer_prompt() -> None:
    with Engine(tiny_pair(), EngineConfig(prefill_step=128, memory_limit=1 << 34)) as engine:
        short, long = (engine.memory.need(GenerationRequest(random_prompt(n), 1), "full") for n in (1000, 3000))
    assert long.working - short.working == pytest.approx(128 * 2000 * 4 * 4, rel=0.25)  # four heads


@pytest.mark.parametrize("stated", ["max_recommended_working_set_size", "total_memory"])  # by Metal, by CUDA
def test_a_tenth_of_the_devices_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch, stated: str) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {stated: 1 << 30})
    assert default_limit() == int(0.9 * (1 << 30))


@pytest.mark.parametrize("context", [200, 1024])
def test_no_position_is_asked_for_that_the_model_does_not_know(monkeypatch: pytest.MonkeyPatch, context: int) -> None:
    """A learned table of positions ends: what lies behind it is anybody's memory."""
    depths: list[int] = []
    monkeypatch.setattr(footprint, "fill", lambda cache, depth: depths.append(depth))
    measure_footprint(tiny_model("llama"), context)
    assert all(depth + 32 <= context for depth in depths)
    assert len(depths) == (context > 300)
