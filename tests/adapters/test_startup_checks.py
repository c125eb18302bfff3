"""The start-up probe passes where the oracle does and flags the models that ignore explicit positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specprefill.adapters import rotation
from mlx_specprefill.adapters.registry import adapter_for
from mlx_specprefill.adapters.startup_checks import probe_sparse
from tests.support.oracle import build, has_experts, tiny_models
from tests.support.precision import float32_only, numbers

VERIFIED = [name for name, tiny in tiny_models().items() if adapter_for(tiny.architecture).sparse_refusal is None]
FLAT = float32_only("its attention is so flat that gaps change its logits by less than half precision does")
HALF = ["llama", "llama+window", "qwen3", "qwen3_5", "nemotron_h", "gemma3_text", "gemma2", "lfm2", "gemma3n"]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("name", VERIFIED)
def test_passes_on_every_verified_model(name: str) -> None:
    assert probe_sparse(build(name)) is None


@pytest.mark.parametrize("name", ["afm7", "gpt2", "gpt_bigcode", "llama4", "deepseek_v41", "phi3small"])
def test_flags_models_that_ignore_positions(name: str) -> None:
    assert probe_sparse(build(name))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_no_alarm(name: str, dtype: mx.Dtype) -> None:
    assert not has_experts(name)
    assert probe_sparse(build(name, dtype)) is None


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_quantized_weights_are_no_alarm(name: str) -> None:
    model = build(name)
    mx.eval(model)
    quantize(model)
    assert probe_sparse(model) is None


def quantize(model: nn.Module) -> None:
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized") and fits(m))


def fits(module: Any) -> bool:
    return module.weight.shape[-1] % 32 == 0


def shifted(self: Any, x: mx.array, dims: int, *args: Any, offset: Any = 0, **kwargs: Any) -> mx.array:
    if isinstance(offset, mx.array) and offset.ndim == 2:
        offset = offset[:, :1] + mx.arange(offset.shape[1])[None]
    return original(self, x, dims, *args, offset=offset, **kwargs)


original: Callable[..., mx.array] = rotation.PositionMappedRoPE.__call__


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_5", marks=FLAT), "deepseek_v3", "gpt_oss"])
def test_flags_a_mapping_that_closes_the_gaps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    monkeypatch.setattr(rotation.PositionMappedRoPE, "__call__", shifted)
    assert probe_sparse(model) == "a chunk with gaps differs from the same tokens fed one by one"


def test_an_exception_becomes_the_reason() -> None:
    model = build("llama")

    class Broken(type(model)):
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            raise TypeError("takes no cache")

    model.__class__ = Broken
    reason = probe_sparse(model)
    assert reason is not None
    assert "TypeError: takes no cache" in reason


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_5", "afm7"])
def test_leaves_nothing_behind(name: str) -> None:
    model = build(name)
    tokens = mx.array([[1, 2, 3, 4]])
    before = model(tokens)
    weights = {key: numbers(value) for key, value in tree_flatten(model.parameters())}
    state: Any = mx.random.state
    installed, random_state = mx.fast.rope, np.array(state[0])
    attributes = set(vars(model)) | set(model)
    probe_sparse(model)
    assert mx.fast.rope is installed
    assert np.array_equal(np.array(state[0]), random_state)
    assert set(vars(model)) | set(model) == attributes
    after = dict(tree_flatten(model.parameters()))
    assert all(np.array_equal(weights[key], numbers(after[key])) for key in weights)
    assert mx.array_equal(model(tokens), before)
