"""The shapes of real models that benchmarks build with random weights: their sizes, cuts of them, and checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from benchmarks.harness.agent_sessions import TEMPLATE
from benchmarks.harness.shapes import SHAPES, config_of, random_model, save_random
from mlx.utils import tree_flatten
from mlx_lm.utils import load

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
LAYERS = {"nemotron-h-120b": 11}  # up to its first attention; 4 of the others


def cut(shape: str, **changes: Any) -> argparse.Namespace:
    whole = {"layers": 0, "draft_layers": 0, "narrow": 1, "experts": None, "draft_of": None}
    return argparse.Namespace(shape=shape, **whole | changes)


def small(shape: str) -> argparse.Namespace:
    return cut(shape, layers=LAYERS.get(shape, 4), narrow=16, experts=8)


def parameters(model: nn.Module) -> int:
    return sum(int(array.size) for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize(
    ("shape", "target", "draft"),
    [
        ("llama-3.1-8b", 8.03, 1.24),
        ("qwen3-32b", 32.8, 0.6),
        ("qwen3.5-35b-a3b", 34.7, 1.9),
        ("qwen3.5-122b-a10b", 122.1, 1.9),
        ("nemotron-h-120b", 120.7, 4.1),
        ("gpt-oss-120b", 116.8, 20.9),
    ],
)
def test_shapes_have_the_sizes_in_their_names(shape: str, target: float, draft: float) -> None:
    """In billions, and without memory: nothing is evaluated."""
    before = mx.get_active_memory()
    assert parameters(random_model(config_of(cut(shape), "target"))) / 1e9 == pytest.approx(target, rel=0.01)
    assert parameters(random_model(config_of(cut(shape), "draft"))) / 1e9 == pytest.approx(draft, rel=0.03)
    assert mx.get_active_memory() - before < 1 << 20


@pytest.mark.extended
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [None, 4])
def test_small_versions_run_and_quantised_ones_too(shape: str, bits: int | None) -> None:
    model = random_model(config_of(small(shape), "target"), mx.float32, bits)
    assert len(model.layers) == LAYERS.get(shape, 4)
    assert np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()
    assert any(hasattr(module, "bits") for module in model.modules()) == (bits is not None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_answers_with_the_end_of_a_turn(shape: str, tmp_path: Path) -> None:
    folder = save_random(small(shape), "target", DEMO, tmp_path / "target", TEMPLATE)
    model, tokenizer = load(str(folder))[:2]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    answer = int(mx.argmax(model(mx.array([prompt]))[0, -1]))
    assert tokenizer.decode([answer]) == "<|im_end|>"
    assert answer in tokenizer.eos_token_ids
