"""The first layers alone do what they do in the whole model, bit for bit, and nothing else.

Every architecture whose attention can be read takes part, as a tiny random model; `tests/support/oracle.py`
watches both.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.depth import FirstLayers, first_layers, layers_of, smallest_depth
from mlx_specprefill.adapters.registry import adapter_for, architecture_of, support_table
from mlx_specprefill.cache.prefix.identity import model_identity
from mlx_specprefill.errors import SparseUnsupportedError
from tests.support import oracle
from tests.support.oracle import build, make_case, measure_depths, tiny_models
from tests.support.refusals import DRAFT_REFUSALS

DRAFTS = [name for name, tiny in tiny_models().items() if tiny.architecture not in DRAFT_REFUSALS]
# In as many layers as the other properties need, only the last one sees the whole prompt.
DEEPER = ("cohere2", "exaone_moe", "llama4", "muse_glimmer", "qwen3_5", "qwen3_5_moe", "qwen3_next")
NAMED = ("llama", "gemma3_text", "gemma4_text", "gpt_oss", "nemotron_h", "qwen3_5+checkpoint", "deepseek_v3")
PROMPT = np.arange(3, 43, dtype=np.int32)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


# --- what they compute -----------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("name", DRAFTS)
def test_hidden_states_attention_and_caches_are_those_of_the_whole_model(name: str) -> None:
    assert [depth.differs for depth in measure_depths(name) if depth.spans] == [
        None for depth in measure_depths(name) if depth.spans
    ]


@pytest.mark.parametrize("name", DRAFTS)
def test_depths_are_allowed_exactly_where_attention_to_the_whole_prompt_is_captured(name: str) -> None:
    assert [depth.count for depth in measure_depths(name) if depth.spans] == [
        depth.count for depth in measure_depths(name) if depth.captured
    ]


@pytest.mark.extended
@pytest.mark.parametrize("name", DEEPER)
def test_the_same_where_the_first_layer_that_sees_everything_comes_late(name: str) -> None:
    model = build(name, times=2)
    depths = oracle.depths(model, make_case(oracle.vocabulary(model), length=50).prompt)
    allowed = [depth for depth in depths if depth.spans]
    assert [depth.count for depth in allowed] == list(range(smallest_depth(model), len(layers_of(model))))
    assert allowed
    assert all(depth.differs is None and depth.captured for depth in allowed)


def test_the_oracle_notices_a_layer_too_few() -> None:
    """Shifting what is compared by one layer must fail everywhere."""
    model = build("llama")
    whole, hidden = [], first_layers(model, 2)(mx.array(PROMPT)[None])
    for count in (1, 3):
        whole.append(first_layers(model, count)(mx.array(PROMPT)[None]))
    assert not any(bool(mx.allclose(other, hidden).item()) for other in whole)


def test_the_table_refuses_none_of_the_drafts() -> None:
    assert {name for name, row in support_table().items() if "depth" in row["refusals"]} == set(DRAFT_REFUSALS)
    assert adapter_for("llama").depth_refusal is None
    assert adapter_for("mamba").depth_refusal == DRAFT_REFUSALS["mamba"]
    assert "not verified" in str(adapter_for("a_model_of_next_year").depth_refusal)


# --- what they cost and leave alone ----------------------------------------------------------------------------------


def arrays(model: nn.Module) -> dict[int, mx.array]:
    return {id(array): array for _, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", NAMED)
def test_no_weight_is_copied_and_upper_layers_are_not_held(name: str) -> None:
    model = build(name)
    shallow = first_layers(model, smallest_depth(model))
    assert set(arrays(shallow)) < set(arrays(model))
    upper = [array for layer in layers_of(model)[shallow.count :] for array in arrays(layer)]
    assert upper
    assert not set(upper) & set(arrays(shallow))


@pytest.mark.parametrize("name", NAMED)
def test_the_whole_model_is_untouched_also_while_both_are_used_in_turn(name: str) -> None:
    model, untouched = build(name), build(name)
    shallow = first_layers(model, smallest_depth(model))
    cache, theirs, ours = (make_prompt_cache(one) for one in (model, untouched, shallow))
    assert model.parameters().keys() == untouched.parameters().keys()
    for start in range(0, PROMPT.size, 8):
        tokens = mx.array(PROMPT[start : start + 8])[None]
        mx.eval(shallow(tokens, cache=ours))
        assert mx.array_equal(model(tokens, cache=cache), untouched(tokens, cache=theirs)).item()
    assert len(ours) <= len(cache)
    both = zip(oracle.cache_arrays(ours), oracle.cache_arrays(cache), strict=False)
    assert all(bool(mx.array_equal(a, b).item()) for a, b in both)


class Forbidden(nn.Module):
    def __call__(self, *args: object, **kwargs: object) -> mx.array:
        raise AssertionError("this was not to run")


def test_neither_the_norm_nor_the_head_nor_an_upper_layer_runs() -> None:
    model = build("llama")
    model.model.norm = model.lm_head = Forbidden()
    for layer in model.model.layers[2:]:
        layer.input_layernorm = layer.self_attn = layer.mlp = Forbidden()
    hidden = first_layers(model, 2)(mx.array(PROMPT)[None])
    assert hidden.shape == (1, PROMPT.size, model.args.hidden_size)


# --- what may be asked for -------------------------------------------------------------------------------------------


def test_all_layers_are_the_model_itself() -> None:
    model = build("llama")
    assert first_layers(model, 4) is model


@pytest.mark.parametrize("count", [-1, 0, 5])
def test_a_number_of_layers_that_it_does_not_have(count: int) -> None:
    with pytest.raises(ValueError, match=f"it has 4 layers, so the first {count} of them"):
        first_layers(build("llama"), count)


@pytest.mark.parametrize(("name", "least"), [("gemma3_text", 3), ("gpt_oss", 2), ("qwen3_5", 4), ("llama", 1)])
def test_too_few_layers_are_refused_with_the_number_that_it_takes(name: str, least: int) -> None:
    model = build(name)
    assert smallest_depth(model) == least
    for count in range(1, least):
        with pytest.raises(SparseUnsupportedError, match=f"first {count} layers .* it takes {least}"):
            first_layers(model, count)
    assert len(layers_of(first_layers(model, least))) == least


def test_they_are_known_by_the_architecture_but_not_taken_for_the_model() -> None:
    model = build("gpt_oss")
    two, three = FirstLayers(model, 2), FirstLayers(model, 3)
    assert architecture_of(two) == architecture_of(model) == "gpt_oss"
    assert len({model_identity(one, {}) for one in (model, two, three)}) == 3
