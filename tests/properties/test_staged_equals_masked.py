"""Staged prefill is exact: what a dense run gives in which dropped tokens are masked from one layer on.

Every architecture that the table allows takes part, at several depths, as a tiny random model in float32.
`tests/support/staged_oracle.py` is the truth.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters import staged as parts
from mlx_specprefill.adapters.probe import probe_staged
from mlx_specprefill.adapters.registry import adapter_for, support_table
from mlx_specprefill.adapters.staged import StagedModel
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.errors import SparseUnsupportedError
from tests.support import oracle
from tests.support.oracle import EXACT, Case, build, make_case, masked_dense, relative_error, tiny_models, vocabulary
from tests.support.refusals import STAGED_REFUSALS
from tests.support.staged_oracle import can_be_staged, deep_enough, masked_from, splits, staged, staged_errors

STAGED = [name for name, tiny in tiny_models().items() if adapter_for(tiny.architecture).staged_refusal is None]
# What people run: all of them have a split.
NAMED = (
    "llama",
    "llama+window",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5+checkpoint",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "gemma3_text",
    "gemma3",
    "mistral3",
    "ministral3",
    "nemotron_h",
    "glm4",
    "glm4_moe",
    "deepseek_v3",
)
CHUNKS = (31, 17, 1)


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def everything(case: Case) -> Case:
    return Case(case.prompt, np.arange(case.prompt.size, dtype=np.int32), case.continuation)


@pytest.mark.parametrize("name", STAGED)
def test_logits_and_16_decoded_tokens_equal_the_run_masked_from_that_layer_on(name: str) -> None:
    errors = [error for error in staged_errors(name).values() if isinstance(error, float)]
    assert all(error < EXACT for error in errors)


@pytest.mark.parametrize("name", NAMED)
def test_every_split_of_what_people_run(name: str) -> None:
    assert name in STAGED
    assert staged_errors(name)
    assert not [error for error in staged_errors(name).values() if isinstance(error, str)]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("keep", [0.05, 0.8])
def test_other_keep_rates(name: str, keep: float) -> None:
    model = deep_enough(name)
    case, first = make_case(vocabulary(model), keep, seed=1), splits(model)[0]
    assert relative_error(staged(model, case, first), masked_from(model, case, first)) < EXACT


@pytest.mark.parametrize("name", NAMED)
def test_the_oracle_tells_depths_apart(name: str) -> None:
    """Masked in all layers, or from the next one on, is something else."""
    model = deep_enough(name)
    case, first = make_case(vocabulary(model)), splits(model)[0]
    got = staged(model, case, first)
    assert relative_error(got, masked_dense(model, case)) > 1e-3
    assert relative_error(got, masked_from(model, case, first + 1)) > 1e-3


@pytest.mark.parametrize("name", ["gpt_oss", "ministral3"])
def test_caches_in_the_slots_of_the_first_layers_are_what_masks_and_positions_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_stand_in", lambda *_: None)
    model = build(name)
    case = make_case(vocabulary(model))
    assert max(relative_error(staged(model, case, n), masked_from(model, case, n)) for n in splits(model)) > 1e-3


@pytest.mark.extended
@pytest.mark.parametrize("name", STAGED)
def test_keeping_every_token_is_bit_identical_to_mlx_lm(name: str) -> None:
    model = deep_enough(name)
    case = everything(make_case(vocabulary(model)))
    plain = oracle.feed(model, make_prompt_cache(model), case.prompt, case.continuation, chunks=CHUNKS)
    for first, error in staged_errors(name).items():
        if isinstance(error, float):
            assert np.array_equal(staged(model, case, first, CHUNKS), plain)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("architecture", oracle.architectures())
def test_the_table_says_what_the_oracle_says(architecture: str) -> None:
    refusals = support_table()[architecture]["refusals"]
    possible = not {"sparse", "depth"} & refusals.keys()
    assert ("staged" not in refusals) == (possible and architecture not in STAGED_REFUSALS)
    if possible:
        assert ("staged" not in refusals) == can_be_staged(architecture)


def test_keys_that_layers_share_across_the_split_are_refused_when_the_model_is_split() -> None:
    with pytest.raises(SparseUnsupportedError, match="shared_kv"):
        StagedModel(build("gemma4_text"), 5)
    with pytest.raises(SparseUnsupportedError, match="can't be run alone"):
        StagedModel(build("hunyuan"), 1)


# --- the probe -------------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("name", STAGED)
def test_the_probe_passes_where_the_oracle_does(name: str) -> None:
    model = deep_enough(name)
    for first, error in staged_errors(name).items():
        if isinstance(error, float):
            assert probe_staged(StagedModel(model, first)) is None


def test_the_probe_notices_a_forward_that_needs_more_than_the_hidden_states() -> None:
    assert probe_staged(StagedModel(build("talkie"), 2)) == "its layers in two parts differ from the model"


def test_the_probe_leaves_nothing_behind() -> None:
    model = build("llama")
    split, cache = StagedModel(model, 2), make_positioned_cache(model)
    before = model(mx.array([[1, 2, 3]]), cache=cache)
    probe_staged(split)
    assert mx.array_equal(model(mx.array([[1, 2, 3]]), cache=make_positioned_cache(model)), before).item()
