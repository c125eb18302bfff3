"""Real shapes: their sizes, and the count of their work against the paper's formula."""

from __future__ import annotations

from fractions import Fraction

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specprefill import InvalidRequestError, shape_work
from mlx_specprefill.shapes import SHAPES, Quantisation, fewer_layers, find_shape, narrower, prefill_macs, random_model
from tests import tiny


def parameters(model: nn.Module) -> int:
    return sum(int(array.size) for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("name", "target", "draft"),
    [
        ("llama-3.1-8b", 8.03, 1.24),
        ("qwen3.5-35b-a3b", 34.7, 1.9),
        ("qwen3.5-122b-a10b", 122.1, 1.9),
        ("nemotron-h-120b", 120.7, 4.1),
        ("gpt-oss-120b", 116.8, 20.9),
    ],
)
def test_shapes_have_the_sizes_in_their_names(name, target, draft):
    shape = SHAPES[name]
    assert parameters(random_model(shape.target)) / 1e9 == pytest.approx(target, rel=0.01)
    assert parameters(random_model(shape.draft)) / 1e9 == pytest.approx(draft, rel=0.03)


@pytest.mark.parametrize("tokens", [1, 8192])
def test_work_is_the_papers_formula(tokens):
    """Table 5 with one row through the output projection instead of all."""
    L, D, I, H, K, V, S = 32, 4096, 14336, 32, 8, 128256, tokens
    paper = L * S * D * (3 * I + D * (2 + 2 * K / H) + 2 * S) + D * V
    config = SHAPES["llama-3.1-8b"].target
    assert prefill_macs(random_model(config), config, tokens) == paper


def test_experts_count_as_often_as_a_token_is_routed_to_them_and_windows_as_wide_as_they_are():
    config = {
        **SHAPES["gpt-oss-120b"].target,
        **{"num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_size": 64},
        **{"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        **{"vocab_size": 100, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]},
    }
    D, I, H, K, hd, S = 64, 96, 4, 2, 16, 50
    projections = D * hd * (2 * H + 2 * K)
    experts = 2 * 3 * D * I + D * 8  # two of them, and the router
    attention = 2 * S * H * hd * (10 + S)
    assert prefill_macs(random_model(config), config, S) == 2 * S * (projections + experts) + attention + D * 100


def test_shape_work_relates_draft_and_target():
    work = shape_work("llama-3.1-8b", 32768, Fraction(1, 10))
    assert work.ratio == work.draft / work.full
    assert work.most_speedup == pytest.approx(1 / (work.ratio + work.kept / work.full))
    with pytest.raises(InvalidRequestError, match="nemotron-h-120b"):
        find_shape("gpt-5")


def test_building_a_shape_holds_no_memory():
    before = mx.get_active_memory()
    model = random_model(SHAPES["qwen3.5-122b-a10b"].target, mx.float16, Quantisation(5))
    assert mx.get_active_memory() - before < 1 << 20
    stored = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert stored / 2**30 == pytest.approx(78, rel=0.02)


@pytest.mark.parametrize("name", SHAPES)
def test_small_versions_run_and_quantised_ones_too(name):
    config = narrower(fewer_layers(SHAPES[name].target, 11 if "nemotron" in name else 4), 16)
    for quantisation in (None, Quantisation(4)):
        model = random_model(config, mx.float32, quantisation)
        logits = model(mx.array([[1, 2, 3]]), cache=None)
        assert np.isfinite(np.array(logits)).all()
    assert any(hasattr(module, "bits") for _, module in model.named_modules())


def test_macs_of_a_tiny_model_are_counted_from_its_own_sizes():
    config = tiny.CONFIGS["llama"]
    D, I, H, K, V, L, S = 48, 64, 4, 2, tiny.VOCAB, 3, 20
    expected = L * S * (D * D * (2 + 2 * K // H) + 3 * D * I + 2 * S * D) + D * V
    assert prefill_macs(random_model(config), config, S) == expected
