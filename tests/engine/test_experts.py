"""Measuring and warming a mixture of experts reach nearly all of them, as a text does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_specprefill import Engine
from mlx_specprefill.loading import footprint
from mlx_specprefill.loading.footprint import measure_footprint, warm_up
from tests.support.tiny import tiny_model, tiny_pair

EXPERTS, LAYERS = 32, 4


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """The experts of each layer that were called."""
    found: dict[int, set[int]] = defaultdict(set)
    original = SwitchGLU.__call__

    def watched(self: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        found[id(self)].update(np.array(indices).ravel().tolist())
        return original(self, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", watched)
    return found


def mixture() -> nn.Module:
    return tiny_model("gpt_oss", num_local_experts=EXPERTS, vocab_size=4096)


def measured(model: nn.Module) -> None:
    measure_footprint(model)


@pytest.mark.parametrize("work", [measured, warm_up])
def test_nearly_all_experts_are_reached(
    work: Callable[[nn.Module], None], reached: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "_on_gpu", lambda: True)
    work(mixture())
    assert len(reached) == LAYERS
    assert min(len(experts) for experts in reached.values()) > 0.8 * EXPERTS


def test_a_processor_needs_no_warming(reached: dict[int, set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "_on_gpu", lambda: False)
    warm_up(mixture())
    assert not reached


def test_an_engine_warms_both_models_and_learns_nothing_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    original = footprint.random_tokens

    def watched(model: nn.Module, count: int) -> mx.array:
        warmed.append(count)
        return original(model, count)

    monkeypatch.setattr(footprint, "_on_gpu", lambda: True)
    monkeypatch.setattr(footprint, "random_tokens", watched)
    with Engine(tiny_pair()) as engine:
        assert all(learnt.count == 0 for learnt in engine.costs._learnt.values())
    assert warmed[:2] == [512, 512]
