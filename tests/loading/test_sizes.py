"""Sizes computed from a model's configuration equal those of the built model."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specprefill import blueprint, loaded_bytes
from mlx_specprefill.loading.footprint import Footprint, measure_footprint
from tests.support import precision
from tests.support.oracle import METAL_ONLY, build, tiny_models
from tests.support.tiny import CONFIGS, tiny_model

STORED = {"float32": "F32", "bfloat16": "BF16"}
UNKNOWN = {"dbrx"}  # it looks at values
REMAPPED = {"bailing_moe_v3", "solar_open"}  # mlx-lm takes another file for these configurations
ASKED = sorted(tiny_models().keys() - METAL_ONLY - REMAPPED)


@pytest.mark.parametrize("name", ASKED)
def test_the_cache_is_what_the_model_itself_takes(name: str) -> None:
    tiny = tiny_models()[name]
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = blueprint(tiny.config, precision.name())
    computed = mx.get_peak_memory() - before
    assert found.refusal is None
    if tiny.architecture in UNKNOWN:
        assert found.cache_bytes(100) is None
        return
    measured = measure_footprint(build(name))
    assert found.footprint == Footprint(measured.per_token, measured.constant)
    assert found.cache_bytes(1000) == measured.of_held(1000)
    assert computed < 65536  # a row of weights, for most


def test_half_precision_halves_the_cache() -> None:
    whole, half = (blueprint(CONFIGS["llama"], dtype) for dtype in ("float32", "bfloat16"))
    assert whole.cache_bytes(10) == 2 * (half.cache_bytes(10) or 0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "no_such"}, "mlx-lm has no architecture 'no_such'"),
        ({}, "config.json has no 'model_type'"),
    ],
)
def test_what_can_not_be_loaded_says_why(config: dict[str, str], reason: str) -> None:
    found = blueprint(config)
    assert found.refusal == reason
    assert found.cache_bytes(1) is None


def test_weights_are_those_of_the_loaded_model() -> None:
    model = tiny_model("llama")
    parameters = {STORED[precision.name()]: sum(array.size for _, array in nn.utils.tree_flatten(model.parameters()))}
    held = sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters()))
    assert loaded_bytes(parameters, "stored") == held


def test_half_precision_is_cast_on_the_cpu_only() -> None:
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    packed = {"U32": 1000, "BF16": 100}
    assert loaded_bytes(packed) == (4400 if on_cpu else 4200)
    assert loaded_bytes(packed, "stored") == 4200
