"""First and recent tokens at positions relative to the cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.rope import observed_rotations
from mlx_specprefill.speculative.strategies import streaming_drafter
from mlx_specprefill.speculative.streaming_cache import StreamingKVCache
from tests.oracle import build
from tests.precision import assert_close
from tests.slices import finish
from tests.tiny import VOCAB, tiny_model

SINKS, WINDOW = 4, 12


def streaming(model: Any, first: int) -> list[StreamingKVCache]:
    with observed_rotations() as seen:
        caches = [StreamingKVCache(SINKS, WINDOW, seen) for _ in make_prompt_cache(model)]
        model(mx.array([[first]]), cache=caches)
    return caches


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama+dynamic", "stablelm", "phi3", "cohere"])
def test_one_layer_equals_a_run_over_what_is_left(name: str) -> None:
    """With one layer, keys don't depend on context, so the truth is a fresh run over first and recent tokens."""
    model = tiny_model(name, num_hidden_layers=1) if name in ("llama", "qwen3") else build(name)
    layers = make_prompt_cache(model)
    if len(layers) != 1:
        model.model.layers = model.model.layers[:1]
    tokens = np.random.default_rng(0).integers(2, VOCAB, 60).tolist()
    caches = streaming(model, tokens[0])
    for i, token in enumerate(tokens[1:], 1):
        ours = model(mx.array([[token]]), cache=caches)[0, -1]
        for part in caches:
            part.evict()
        if i % 7 == 0 or i > 50:
            left = [*tokens[:SINKS], *tokens[SINKS : i + 1][-WINDOW - 1 :]]
            truth = model(mx.array([left]))[0, -1]
            assert_close(ours, truth, atol=1e-4, rtol=1e-4)
    assert all(part.size() == SINKS + WINDOW and part.offset == len(tokens) for part in caches)


def test_taking_back_and_masks() -> None:
    model = tiny_model("llama")
    caches, again = streaming(model, 3), streaming(model, 3)
    model(mx.array([[4, 5, 6, 7]]), cache=caches)
    for part in caches:
        part.trim(2)
    for token in (4, 5):
        model(mx.array([[token]]), cache=again)
    for ours, theirs in zip(caches, again, strict=True):
        assert ours.offset == theirs.offset == 3
        assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=1e-5)


def test_the_small_model_reads_first_and_recent_tokens_only() -> None:
    model = tiny_model("llama")
    prompt = tuple(np.random.default_rng(1).integers(2, VOCAB, 300).tolist())
    drafter = finish(streaming_drafter(model, prompt, SINKS, WINDOW))
    left = [*prompt[:SINKS], *prompt[-WINDOW:]]
    ours = model(mx.array([[9]]), cache=drafter.cache)[0, -1]
    truth = model(mx.array([[*left, 9]]))[0, -1]
    assert_close(ours, truth, atol=1e-4, rtol=1e-4)
