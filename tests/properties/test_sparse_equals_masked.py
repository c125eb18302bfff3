"""Sparse prefill is exact: kept tokens at their original positions give what the masked dense run gives.

Every architecture of the installed mlx-lm takes part, as a tiny random model in float32. `tests/support/oracle.py` is
the truth and shares no code with what is tested.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_specprefill.adapters.registry import adapter_for, support_table
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache
from tests.support import oracle
from tests.support.oracle import EXACT, build, make_case, masked_dense, measure, relative_error, sparse, tiny_models
from tests.support.refusals import DRAFT_REFUSALS, SPARSE_REFUSALS
from tests.support.steps import finish, prefill

NAMED = (
    "llama",
    "llama+window",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "nemotron_h",
    "gpt_oss",
    "gemma3_text",
    "gemma4_text",
    "ministral3",
    "deepseek_v3",
)
VERIFIED = [name for name, tiny in tiny_models().items() if adapter_for(tiny.architecture).sparse_refusal is None]
DISCRIMINATION = 1e-2


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def test_every_decoder_of_mlx_lm_has_a_tiny_model() -> None:
    covered = {tiny.architecture for tiny in tiny_models().values()}
    assert covered | oracle.UNBUILDABLE == set(oracle.architectures())


def test_the_families_that_matter_most_are_among_them() -> None:
    assert set(NAMED) <= set(VERIFIED)
    assert len({tiny_models()[name].architecture for name in VERIFIED}) >= 100


@pytest.mark.parametrize("name", VERIFIED)
def test_sparse_prefill_and_16_decoded_tokens_equal_the_masked_dense_run(name: str) -> None:
    measured = measure(name)
    assert measured.failure is None
    assert measured.error < EXACT


@pytest.mark.parametrize("name", VERIFIED)
def test_contiguous_positions_would_be_noticed(name: str) -> None:
    """The oracle can fail: without the mapping it does, unless the model has no positions at all."""
    measured = measure(name)
    if measured.rotates:
        assert measured.naive_error > DISCRIMINATION
    else:
        assert measured.naive_error < EXACT


@pytest.mark.parametrize("name", VERIFIED)
def test_keeping_every_token_is_bit_identical_to_mlx_lm(name: str) -> None:
    assert measure(name).identical


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("keep", [0.05, 0.8])
def test_other_keep_rates(name: str, keep: float) -> None:
    model = build(name, seed=1)
    case = make_case(oracle.vocabulary(model), keep, seed=1)
    assert relative_error(sparse(model, case), masked_dense(model, case)) < EXACT


@pytest.mark.parametrize("name", NAMED)
def test_the_library_entry_point_is_what_was_verified(name: str) -> None:
    """`prefill` places and feeds in its own chunks; the logits of the last prompt token agree with the oracle."""
    model = build(name)
    case = make_case(oracle.vocabulary(model), decoded=1)
    steps = prefill(model, make_positioned_cache(model), case.prompt.tolist(), case.kept, step=11)
    assert relative_error(np.array(finish(steps)), masked_dense(model, case)[:1]) < EXACT


def test_windows_wrap_in_prefill_and_while_decoding() -> None:
    """A window longer than what is fed would make its property vacuous."""
    case = make_case(16)
    seen = 0
    for name in VERIFIED:
        rings = [leaf for leaf in leaves(make_prompt_cache(build(name))) if isinstance(leaf, RotatingKVCache)]
        assert all(ring.max_size < case.kept.size - 1 <= oracle.PROMPT_LEN / 2 for ring in rings)
        seen += bool(rings)
    assert seen >= 20


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in VERIFIED if not oracle.has_experts(name)])
def test_sparse_prefill_keeps_the_dtypes_of_a_dense_one(name: str, dtype: mx.Dtype) -> None:
    model = build(name, dtype)
    case = make_case(16, length=24, decoded=1)

    def dtypes(caches: list, tokens: np.ndarray, positions: np.ndarray | None) -> list[mx.Dtype]:
        oracle.feed(model, caches, tokens, case.continuation, positions)
        logits = model(mx.array([[1]]), cache=caches)
        return [logits.dtype, *(array.dtype for array in oracle.cache_arrays(caches))]

    dense = dtypes(make_prompt_cache(model), case.prompt, None)
    assert dtypes(make_positioned_cache(model), case.prompt[case.kept], case.kept) == dense


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize("architecture", oracle.architectures())
def test_the_committed_table_says_what_the_oracle_says(architecture: str) -> None:
    """Errors of exact models are rounding, which differs between BLAS libraries; the others are compared roughly."""
    committed, measured = dict(support_table()[architecture]), oracle.table_row(architecture)
    committed["refusals"] = dict(committed["refusals"])
    was, now = committed.pop("error"), measured.pop("error")
    assert committed == measured
    assert (was is None) == (now is None)
    if now is not None:
        assert now <= max(2 * was, EXACT / 10)
        assert was <= max(2 * now, EXACT / 10)


def test_the_table_has_no_other_rows() -> None:
    assert set(support_table()) == set(oracle.architectures())


@pytest.mark.parametrize("architecture", sorted(SPARSE_REFUSALS))
def test_no_architecture_is_refused_without_grounds(architecture: str) -> None:
    """It fails, differs from the oracle, has no attention to be sparse about, or can't be built here."""
    if architecture in oracle.UNBUILDABLE:
        return
    measured = [measure(name) for name in oracle.variants(architecture)]
    assert all(m.failure or m.attention == "recurrent" or m.error > EXACT for m in measured)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", oracle.architectures())
def test_a_draft_is_refused_exactly_where_capture_finds_no_row(architecture: str) -> None:
    measured = [measure(name) for name in oracle.variants(architecture)]
    silent = architecture in oracle.UNBUILDABLE or any(m.captured == 0 for m in measured)
    assert silent == (architecture in DRAFT_REFUSALS)


def test_refused_drafts_are_architectures() -> None:
    assert set(DRAFT_REFUSALS) <= set(oracle.architectures())


def test_unknown_architectures_are_refused_not_guessed() -> None:
    adapter = adapter_for("a_model_of_next_year")
    assert adapter.sparse_refusal is not None
    assert "not verified" in adapter.sparse_refusal
    assert adapter.draft_refusal is not None


@pytest.mark.parametrize(("alias", "architecture"), [("mistral", "llama"), ("kimi_k2", "deepseek_v3")])
def test_aliases_of_mlx_lm_are_resolved(alias: str, architecture: str) -> None:
    assert adapter_for(alias) == adapter_for(architecture)
    assert adapter_for(alias).sparse_refusal is None
