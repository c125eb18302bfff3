"""A model that reads within a window equals the model with the same cut as a mask, whatever the forwards."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.adapters.window import WindowedReader, wrap_window
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.config import DraftWindow
from tests.support.oracle import build, vocabulary

LENGTH = 220
WINDOW = DraftWindow(tokens=24, sinks=5, block=16)
FAMILIES = ["llama", "qwen3_5", "gpt_oss", "gemma3_text"]


class Masked(KVCache):
    """Shows a token the sinks, `tokens` in front of its block, and its block, by a mask over all keys."""

    def __init__(self, whole: int) -> None:
        super().__init__()
        self.whole = whole

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
        rows = []
        for query in range(self.offset, self.offset + N):
            first = 0 if query < self.whole else query // WINDOW.block * WINDOW.block - WINDOW.tokens
            rows.append([key <= query and (key >= first or key < WINDOW.sinks) for key in range(self.offset + N)])
        return mx.array(np.array(rows))


def masked(model: Any) -> list[Any]:
    cache = make_prompt_cache(model)
    ring = max((part.max_size for part in leaves(cache) if hasattr(part, "max_size")), default=0)
    least = max(ring, WINDOW.tokens + WINDOW.sinks)
    whole = -(-least // WINDOW.block) * WINDOW.block
    return [Masked(whole) if type(part) is KVCache else part for part in cache]


def keys_of(cache: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [np.array(part.state[0].astype(mx.float32)) for part in leaves(cache) if isinstance(part, KVCache)]


@pytest.mark.parametrize("name", FAMILIES)
def test_it_equals_the_masked_model_whatever_the_forwards(name: str) -> None:
    model = build(name)
    install_patches()
    prompt = mx.array(np.random.default_rng(1).integers(0, vocabulary(model), LENGTH))[None]
    truth = masked(model)
    for start in range(0, LENGTH, 50):
        model(prompt[:, start : start + 50], cache=truth)
    for seed in range(3):
        cache, start, rng = make_prompt_cache(model), 0, random.Random(seed)
        while start < LENGTH:
            end = min(LENGTH, start + rng.choice([1, 7, 16, 40, 120]))
            WindowedReader(model, WINDOW)(prompt[:, start:end], cache)
            start = end
        for ours, theirs in zip(keys_of(cache), keys_of(truth), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())


def test_the_cut_is_seen() -> None:
    """Keys of the second layer differ from a dense reading's behind the window, and equal them in front."""
    model = build("llama")
    install_patches()
    prompt = mx.array(np.random.default_rng(1).integers(0, vocabulary(model), LENGTH))[None]
    dense, cut = make_prompt_cache(model), make_prompt_cache(model)
    model(prompt, cache=dense)
    WindowedReader(model, WINDOW)(prompt, cut)
    ours, theirs = keys_of(cut)[1], keys_of(dense)[1]
    assert np.abs(ours - theirs)[:, :, 32:].max() > 1e-2
    np.testing.assert_allclose(ours[:, :, :32], theirs[:, :, :32], atol=1e-5)


def test_attention_sees_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that all queries see together grow as the prompt does, not as its square."""
    model = build("llama")
    install_patches()
    seen = {length: work(model, length) for length in (512, 4096)}
    assert seen[4096] <= 9 * seen[512]


def work(model: Any, length: int) -> int:
    total = 0
    plain: Any = getattr(mx.fast.scaled_dot_product_attention, "__wrapped__")  # noqa: B009 - mypy knows no wrapper

    def count(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        nonlocal total
        total += q.shape[2] * k.shape[2]
        return plain(q, k, v, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "scaled_dot_product_attention", wrap_window(count))
        cache = make_prompt_cache(model)
        for _ in range(0, length, 256):
            WindowedReader(model, WINDOW)(mx.zeros((1, 256), dtype=mx.int32), cache)
    return total
