"""Models out of GGUF files equal the same weights out of safetensors."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from mlx_specprefill import load_pair
from mlx_specprefill.adapters.gguf import load_gguf
from tests.gguf_files import CONFIGS, F32, contents, from_safetensors, random_weights, rounded, tiny

PROMPT = mx.array(np.random.default_rng(3).integers(3, 250, (1, 24)))
PACKED = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)


def logits(model):
    return np.array(model(PROMPT).astype(mx.float32))


def mixed(name):
    """As in real files: rows of several types in one model, the embedding finer."""
    if "embed_tokens" in name or "lm_head" in name:
        return Kind.Q8_0
    return Kind.Q4_0 if "mlp" in name else Kind.Q4_1


@pytest.mark.parametrize("architecture", CONFIGS)
def test_unpacked_weights_equal_safetensors(tmp_path, architecture):
    config = CONFIGS[architecture]
    weights = random_weights(config)
    file = contents(architecture, config, weights).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, weights))
    model, _, read = load_gguf(file)
    assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    assert {key: read[key] for key in config} == pytest.approx(config)


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kind", [*PACKED, "mixed"], ids=lambda kind: getattr(kind, "name", kind))
def test_packed_weights_equal_their_values(tmp_path, architecture, kind):
    config, kind_of = CONFIGS[architecture], mixed if kind == "mixed" else lambda _: kind
    weights = random_weights(config)
    file = contents(architecture, config, weights, kind_of).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, rounded(weights, kind_of)))
    for pack in (True, False):
        model, _, read = load_gguf(file, dtype=mx.float32, pack=pack)
        assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())
        layers = [
            module for module in model.modules() if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
        ]
        assert len(layers) == (sum(array.ndim > 1 for array in weights.values()) if pack else 0)
        assert ("quantization" in read) == pack


def test_bits_are_kept_per_tensor(tmp_path):
    config = CONFIGS["llama"]
    file = contents("llama", config, random_weights(config), mixed).write(tmp_path / "tiny.gguf")
    model, _, read = load_gguf(file)
    assert read["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "lm_head": {"group_size": 32, "bits": 8},
    }
    assert model.model.embed_tokens.bits == 8
    assert model.layers[0].self_attn.q_proj.bits == 4
    assert {str(array.dtype) for _, array in nn.utils.tree_flatten(model.parameters())} == {
        "mlx.core.uint32",
        "mlx.core.float16",
    }


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name)
def test_other_types_are_read_by_the_gguf_package(tmp_path, kind):
    config = CONFIGS["qwen3"]
    weights = random_weights(config)
    file = contents("qwen3", config, weights, lambda _: kind).write(tmp_path / "tiny.gguf")
    expected = logits(from_safetensors(tmp_path / "folder", config, rounded(weights, lambda _: kind)))
    model, _, _ = load_gguf(file, dtype=mx.float32)
    assert np.abs(logits(model) - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(("kind", "dtype"), [(F32, mx.float32), (Kind.BF16, mx.bfloat16), (Kind.Q4_0, mx.float16)])
def test_the_files_own_dtype(tmp_path, kind, dtype):
    config = CONFIGS["llama"]
    file = contents("llama", config, random_weights(config), lambda _: kind).write(tmp_path / "tiny.gguf")
    model, _, _ = load_gguf(file)
    assert model.model.norm.weight.dtype == dtype
    assert model(PROMPT).dtype == dtype


def test_a_pair_of_files(tmp_path):
    target = tiny("llama").write(tmp_path / "big.Q4_1.gguf")
    draft = tiny("qwen3").write(tmp_path / "small.gguf")
    pair = load_pair(target, draft)
    assert pair.sparse_refusal is None
    assert (pair.target_id, pair.draft_id, pair.model_type) == ("big.Q4_1", "small", "llama")
    assert (pair.context_length, pair.draft_context, pair.dtype) == (512, 512, "float32")
    assert pair.eos_token_ids == {0, 2}


def test_auto_unpacks_on_the_cpu_only(tmp_path):
    config = CONFIGS["llama"]
    file = contents("llama", config, random_weights(config), mixed).write(tmp_path / "tiny.gguf")
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert isinstance(load_pair(file).target.lm_head, nn.Linear if on_cpu else nn.QuantizedLinear)
    asked = load_pair(file, dtype="float32")
    assert isinstance(asked.target.lm_head, nn.QuantizedLinear)
    assert asked.dtype == "float32"
