"""After any pattern of accepted and rejected tokens, every cache is that of a fresh run over the same text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.cache.positioned import Snapshot, leaves, quantize_kv
from mlx_specprefill.speculative.rollback import Rollback, rollback_refusal
from tests.support.oracle import build, runnable, tiny_models, vocabulary
from tests.support.precision import assert_close
from tests.support.refusals import SPECULATION_REFUSALS
from tests.support.rows import Row, assert_same_contents, make_rows, prefilled
from tests.support.tiny import FAMILIES, VOCAB, WINDOW, tiny_model

REFUSED = {"baichuan_m1", "deepseek_v41", "llama4", "longcat_flash_ngram", "mamba", "mamba2", "rwkv7"}
RUNNABLE = runnable()
MORE = ("lfm2", "granitemoehybrid", "qwen3_next", "falcon_h1", "gemma3_text", "deepseek_v3", "jamba")


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget() -> Iterator[None]:
    yield
    model_of.cache_clear()
    start.cache_clear()


@cache
def model_of(name: str) -> Any:
    return tiny_model(name) if name in FAMILIES else build(name)


@cache
def start(name: str, index: int) -> tuple[Row, list[Any]]:
    row = make_rows(vocabulary(model_of(name)), 4, seed=2)[index]
    return row, prefilled(model_of(name), row)[0]


def same_contents(ours: list[Any], theirs: list[Any]) -> bool:
    try:
        assert_same_contents(ours, theirs, atol=1e-3)
    except AssertionError:
        return False
    return True


def fed_plainly(model: Any, prompt_cache: list[Any], text: list[int]) -> list[Any]:
    for token in text:
        model(mx.array([[token]]), cache=prompt_cache)
        mx.eval([part.state for part in prompt_cache])
    return prompt_cache


# (right tokens, wrong ones) of each verification
rounds = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=8)


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
@settings(max_examples=6)
@given(pattern=rounds, index=st.integers(0, 3), seed=st.integers(0, 99))
def test_verifications_leave_what_a_fresh_run_leaves(
    name: str, pattern: list[tuple[int, int]], index: int, seed: int
) -> None:
    model = model_of(name)
    _, ready = start(name, index)
    rng = np.random.default_rng(seed)
    ours, text = copy.deepcopy(ready), []
    for right, wrong in pattern:
        tokens = rng.integers(2, VOCAB, right + wrong).tolist()
        rollback = Rollback(ours)
        mx.eval(rollback.forward(model, mx.array([tokens])))
        rollback.keep(right)
        mx.eval([part.state for part in ours])
        text += tokens[:right]
    assert_same_contents(ours, fed_plainly(model, copy.deepcopy(ready), text), atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, *MORE])
def test_forwards_that_are_taken_back_leave_what_a_fresh_run_leaves(name: str) -> None:
    """Twice from one snapshot; where a part of the cache can't be trimmed, all that was fed since is taken back."""
    model = model_of(name)
    for index in range(4):
        _, ready = start(name, index)
        ours, text = copy.deepcopy(ready), []
        rng = np.random.default_rng(index)
        for fed, kept in ((5, 2), (3, 0), (4, 4), (WINDOW + 3, 1), (2, 1)):
            snapshot = Snapshot(ours)
            for _ in range(2):
                tokens = rng.integers(2, VOCAB, fed).tolist()
                for part in (tokens[:1], tokens[1:2], tokens[2:]):
                    if part:
                        mx.eval(model(mx.array([part]), cache=ours))
                taken = snapshot.take_back(fed - kept, fed) if kept < fed else 0
                assert taken in (fed - kept, fed)
                stayed = tokens[: fed - taken]
                if stayed:
                    break
            text += stayed
        assert_same_contents(ours, fed_plainly(model, copy.deepcopy(ready), text), atol=1e-4)


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_architecture_goes_back_or_says_why_not(name: str) -> None:
    """And what goes back goes back right; composites, latent attention and gates included."""
    model = build(name)
    stock = make_prompt_cache(model)
    refusal = rollback_refusal(model)
    assert (refusal is None) == (name not in REFUSED), refusal
    if refusal is not None:
        return
    tokens = np.random.default_rng(0).integers(2, vocabulary(model), 40).tolist()
    fresh = make_prompt_cache(model)
    for part in (stock, fresh):
        mx.eval(model(mx.array([tokens[:33]]), cache=part))
    rollback = Rollback(stock)
    rollback.forward(model, mx.array([tokens[33:]]))
    rollback.keep(3)
    same = same_contents(stock, fed_plainly(model, fresh, tokens[33:36]))
    assert same == (tiny_models()[name].architecture not in SPECULATION_REFUSALS)


def test_quantised_caches_go_back_at_their_shift() -> None:
    model = tiny_model("llama", head_dim=64, hidden_size=64)
    row = make_rows(VOCAB, 4)[1]
    caches = [quantize_kv(prefilled(model, row)[0], 8) for _ in range(2)]
    (ours, shift), (fresh, _) = caches
    assert shift > 0
    rollback = Rollback(ours, shift)
    rollback.forward(model, mx.array([[3, 4, 5, 6]]))
    rollback.keep(2)
    Rollback(fresh, shift).forward(model, mx.array([[3, 4]]))
    for mine, other in zip(leaves(ours), leaves(fresh), strict=True):
        assert mine.offset == other.offset
    ours_next, fresh_next = (Rollback(part, shift).forward(model, mx.array([[9]])) for part in (ours, fresh))
    assert_close(ours_next, fresh_next, atol=1e-5, rtol=1e-4)
