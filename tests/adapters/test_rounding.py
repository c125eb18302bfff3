"""The probe tells a wrong layer from the rounding of half precision, however deep a model is and with many experts."""

from __future__ import annotations

import importlib
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.adapters.startup_checks import probe_sparse
from tests.support.oracle import perturbed
from tests.support.precision import float32_only
from tests.support.rounding import HALVES, rounded

pytestmark = float32_only("it rounds by itself")
SIZES = {"vocab_size": 256, "rms_norm_eps": 1e-5, "num_key_value_heads": 2}
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 32, "intermediate_size": 896,
    "num_attention_heads": 8, "head_dim": 32, "rope_theta": 500000.0, "tie_word_embeddings": False,
} | SIZES  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}  # fmt: skip


def gpt_oss(layers: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "num_hidden_layers": layers, "num_local_experts": 32, "num_experts_per_tok": 4,
        "hidden_size": 192, "intermediate_size": 192, "head_dim": 16, "num_attention_heads": 8, "sliding_window": 128,
        "rope_theta": 150000, "rope_scaling": YARN,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    } | SIZES  # fmt: skip


def qwen3_5(layers: int, width: int) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_5_moe", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64, "head_dim": 32, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "max_position_embeddings": 262144,
    } | SIZES  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": text}


# Published shapes, an eighth as wide, with as many layers; those of every run are shallow.
SHAPES = {
    "gpt-oss": gpt_oss(6),
    "qwen3.5": qwen3_5(8, 128),
    "llama-8b": LLAMA_8B,
    "gpt-oss-20b": gpt_oss(24),
    "gpt-oss-120b": gpt_oss(36),
    "qwen3.5-35b": qwen3_5(40, 256),
    "qwen3.5-122b": qwen3_5(48, 384),
}
REFUSALS = (
    "explicit contiguous positions change its logits",
    "a chunk with gaps differs from the same tokens fed one by one",
)
EACH = [name if name in ("gpt-oss", "qwen3.5") else pytest.param(name, marks=pytest.mark.nightly) for name in SHAPES]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def random_model(name: str) -> nn.Module:
    config = json.loads(json.dumps(SHAPES[name]))
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(perturbed, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    install_patches()
    return model


def with_a_layer_that_ignores_offsets(model: nn.Module, which: int = -1) -> nn.Module:
    rope = [layer.self_attn.rope for layer in model.layers if "self_attn" in layer][which]
    kind = type(rope)

    def ignoring(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return kind.__call__(self, x)

    rope.__class__ = type(kind.__name__, (kind,), {"__call__": ignoring, "__module__": kind.__module__})
    return model


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EACH)
def test_rounding_is_no_alarm(name: str, half: str) -> None:
    assert probe_sparse(rounded(random_model(name), HALVES[half])) is None


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EACH)
def test_a_layer_that_ignores_offsets_is_one(name: str, half: str) -> None:
    model = with_a_layer_that_ignores_offsets(random_model(name))
    assert probe_sparse(rounded(model, HALVES[half])) in REFUSALS
