"""A model made from a configuration of transformers 5 is that of the old one: same logits, so same positions."""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_specprefill.errors import LoadError
from mlx_specprefill.loading.rope_names import check_rope_names, with_old_rope_names
from tests.support.oracle import METAL_ONLY, UNBUILDABLE, tiny_models

BASE, LOCAL = 777.0, 333.0
LOCAL_NAMES = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta")
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 3.0, "alpha": 50.0},
    "longrope": {"original_max_position_embeddings": 16, "short_factor": 1.0, "long_factor": 3.0},
    "mrope": {"mrope_section": [2, 3, 3]},
}
OWN_BASE = frozenset({"qwen3_5", "qwen3_5_moe"})  # their rope_parameters have a default: the old names are not read
OWN_SCALING = frozenset({"minimax_m3_vl"})  # scaled by rope_parameters alone, whatever rope_scaling says
UNEVEN = frozenset({"nanochat"})  # two models of one seed differ
NAMES = sorted(
    name for name, tiny in tiny_models().items() if tiny.architecture not in UNBUILDABLE | METAL_ONLY | UNEVEN
)
IDS = mx.array([np.random.default_rng(0).integers(2, 90, 48).tolist()])


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


def old(name: str, **scaling: Any) -> dict[str, Any]:
    """The tiny model's configuration with bases of its own; `max_position_embeddings` are fewer than the ids."""
    config = copy.deepcopy(dict(tiny_models()[name].config))
    text = text_of(config)
    text["rope_theta"] = BASE
    text |= {local: LOCAL for local in LOCAL_NAMES if local in text}
    if scaling:
        text |= {"rope_scaling": scaling, "max_position_embeddings": 32}
    return config


def saved_by_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """Return a result of `standardize_rope_params`: one mapping, or one for each type of layers."""
    config = copy.deepcopy(config)
    text = text_of(config)
    scaling = text.pop("rope_scaling", None) or {"rope_type": "default"}
    kind = scaling.get("rope_type") or scaling["type"]
    scaling = {name: value for name, value in scaling.items() if name != "type"}
    settings = scaling | {"rope_type": kind, "rope_theta": text.pop("rope_theta")}
    local = [text.pop(name) for name in LOCAL_NAMES if name in text]
    if "partial_rotary_factor" in text:
        settings["partial_rotary_factor"] = text.pop("partial_rotary_factor")
    text["rope_parameters"] = settings
    if local:
        sliding = {"rope_type": "default", "rope_theta": local[0]}
        text["rope_parameters"] = {"full_attention": settings, "sliding_attention": sliding}
    return config


def logits(name: str, config: dict[str, Any]) -> mx.array:
    module = importlib.import_module(f"mlx_lm.models.{tiny_models()[name].architecture}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    model.update(tree_map(lambda array: array * 1.5 if array.ndim > 1 else array, model.parameters()))
    result: mx.array = model(IDS)
    return result


def reads_old_names(name: str) -> bool:
    tiny = tiny_models()[name]
    return (
        tiny.architecture not in OWN_BASE
        and "rope_theta" in text_of(dict(tiny.config))
        and "rope_parameters" not in text_of(dict(tiny.config))
    )


@pytest.mark.parametrize("name", [name for name in NAMES if reads_old_names(name)])
def test_the_base_is_the_same_under_both_names(name: str) -> None:
    given = with_old_rope_names(saved_by_transformers_5(old(name)))
    assert bool(mx.array_equal(logits(name, old(name)), logits(name, given), equal_nan=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in NAMES if reads_old_names(name) and name not in OWN_SCALING])
@pytest.mark.extended
def test_scaled_positions_are_the_same_under_both_names(name: str, kind: str) -> None:
    stated = old(name, type=kind, rope_type=kind, **KINDS[kind])
    try:
        expected = logits(name, stated)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        pytest.skip(f"{name} has no {kind}")
    given = with_old_rope_names(saved_by_transformers_5(stated))
    assert bool(mx.array_equal(expected, logits(name, given), equal_nan=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_that_says_all_is_left_as_it_is(name: str) -> None:
    config = dict(tiny_models()[name].config)
    assert bool(mx.array_equal(logits(name, config), logits(name, with_old_rope_names(config)), equal_nan=True))


def test_without_the_old_names_most_models_have_another_base_or_none() -> None:
    """So the tests above see the positions."""

    def differs(name: str) -> bool:
        try:
            found = logits(name, saved_by_transformers_5(old(name)))
        except (TypeError, KeyError):
            return True
        return not bool(mx.array_equal(logits(name, old(name)), found, equal_nan=True))

    names = [name for name in ("llama", "qwen2", "gemma3_text", "glm4", "phi3", "olmo2") if name in NAMES]
    assert len(names) == 6
    assert all(map(differs, names))


def test_other_names_of_old_configurations() -> None:
    """GPT-NeoX and MiniMax say the same by names of their own; phi3's `su` is now longrope."""
    stated = {"rope_parameters": {"rope_type": "su", "rope_theta": 5.0, "partial_rotary_factor": 0.25}, "head_dim": 64}
    named = with_old_rope_names(stated)
    assert (named["rope_theta"], named["rotary_emb_base"], named["rotary_pct"], named["rotary_dim"]) == (5, 5, 0.25, 16)
    assert named["rope_scaling"] == {"rope_type": "longrope", "type": "longrope", "partial_rotary_factor": 0.25}
    compressed = {"main": {"rope_theta": 5.0}, "compress": {"rope_theta": 7.0, "rope_type": "yarn", "factor": 2.0}}
    named = with_old_rope_names({"rope_parameters": compressed})
    assert (named["rope_theta"], named["compress_rope_theta"], named["rope_scaling"]["factor"]) == (5, 7, 2)


def test_what_counts_more() -> None:
    """As in transformers: `rope_scaling`, then `rope_parameters`, then `rope_theta`."""
    both = {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0, "rope_type": "linear", "factor": 2.0}}
    assert with_old_rope_names(both)["rope_theta"] == 2.0
    scaled = both | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    assert with_old_rope_names(scaled)["rope_theta"] == 1.0
    assert with_old_rope_names(scaled)["rope_scaling"]["factor"] == 3.0
    nothing = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    assert "rope_theta" not in with_old_rope_names(nothing)


def test_settings_that_a_model_cannot_have_are_refused_or_told(caplog: pytest.LogCaptureFixture) -> None:
    llama, gemma, gemma3 = (importlib.import_module(f"mlx_lm.models.{n}") for n in ("llama", "gemma", "gemma3_text"))
    full, sliding = {"rope_theta": 1e6, "rope_type": "default"}, {"rope_theta": 1e4, "rope_type": "default"}
    each = with_old_rope_names({"rope_parameters": {"full_attention": full, "sliding_attention": sliding}})
    check_rope_names(each, gemma3)
    with pytest.raises(LoadError, match=r"rope_parameters.* sliding_attention, which mlx-lm's llama does not read"):
        check_rope_names(each, llama)
    nested = with_old_rope_names(
        {"text_config": {"rope_parameters": {"rope_theta": 1.0, "rope_type": "linear", "factor": 2.0}}}
    )
    with caplog.at_level(logging.WARNING):
        check_rope_names(nested, llama)
        assert not caplog.records
        check_rope_names(nested, gemma)
    assert "scales RoPE" in caplog.text
