"""Tokens that are read behind what a cache holds: the masked dense run in which earlier ones don't see them.

Every architecture takes part some of whose layers keep all that they were fed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_specprefill.cache.positioned import (
    PositionedRotatingKVCache,
    leaves,
    make_positioned_cache,
    place,
)
from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.speculative.rollback import Rollback
from tests.properties.test_sparse_equals_masked import DISCRIMINATION, NAMED, VERIFIED
from tests.support import oracle
from tests.support.autoregressive import decode
from tests.support.oracle import EXACT, Case, build, can_recall_into, make_case, masked_dense, relative_error
from tests.support.precision import bound
from tests.support.rows import assert_same_contents, logprob_error, next_position, tokens
from tests.support.steps import recall

RECALLING = [name for name in VERIFIED if can_recall_into(name)]
NAMED_RECALLING = [name for name in NAMED if name in RECALLING]
ENDS = (50, 78)  # of the first text and the second
RECALLS = (1, 3)  # of five turns


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def recalled_case(vocab: int, seed: int = 0) -> Case:
    """Three texts; after the first and the second, runs and single tokens of what lies before come in later."""
    case = make_case(vocab, keep=0.5, seed=seed)
    turns = 2 * np.searchsorted(ENDS, np.arange(case.prompt.size), side="right")
    first, second = (case.kept[turns[case.kept] == turn] for turn in (0, 2))
    turns[first[2:6]], turns[first[9]], turns[first[-3:-1]] = 1, 1, 1
    turns[first[7]], turns[first[11:13]], turns[second[1]], turns[second[3:6]] = 3, 3, 3, 3
    return replace(case, turns=turns.astype(np.int32), recalls=RECALLS)


def prefilled(model: nn.Module, case: Case, sizes: Sequence[int] = (3, 1, 2)) -> tuple[list[Any], mx.array]:
    """The library: each text on top of the one before and of what was recalled of it; cache and last logits (1, V).

    Args:
        sizes: tokens per forward of a recall, in turn.
    """
    cache, step = make_positioned_cache(model), cycle(sizes)
    for turn in range(5):
        of = case.kept[case.turns[case.kept] == turn]
        if turn in case.recalls:
            end = next_position(cache)
            recall(model, cache, case.prompt.tolist(), of, lambda: next(step))
            assert next_position(cache) == end
            continue
        for part in np.array_split(of, 3):
            place(cache, part)
            logits = model(mx.array(case.prompt[part])[None], cache=cache)
            mx.eval(logits, [layer.state for layer in cache])
    return cache, logits[:, -1]


def recalled(model: nn.Module, case: Case, sizes: Sequence[int] = (3, 1, 2)) -> np.ndarray:
    """Logits of the last prompt token and of every continuation token."""
    cache, logits = prefilled(model, case, sizes)
    rows = [logits[0]]
    for token in case.continuation.tolist():
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


def has(name: str, kind: type) -> bool:
    return any(isinstance(part, kind) for part in leaves(make_positioned_cache(build(name))))


def test_families_of_all_kinds_take_part() -> None:
    assert set(NAMED) == set(NAMED_RECALLING)
    assert len(RECALLING) >= 100
    for kind in (PositionedRotatingKVCache, ArraysCache):
        assert sum(has(name, kind) for name in NAMED) >= 3


@pytest.mark.parametrize("name", RECALLING)
def test_recalled_tokens_equal_the_masked_dense_run(name: str) -> None:
    model = build(name)
    case = recalled_case(oracle.vocabulary(model))
    sizes = (3, 2) if name == "plamo3" else (3, 1, 2)  # its window is one narrower for a token alone
    assert relative_error(recalled(model, case, sizes), masked_dense(model, case)) < EXACT


@pytest.mark.parametrize("name", NAMED_RECALLING)
def test_other_laws_are_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: all in one turn, recurrent layers in the order of the text, recalled tokens in the rings."""
    model = build(name)
    case = recalled_case(oracle.vocabulary(model), seed=2)
    got = recalled(model, case)
    assert relative_error(got, masked_dense(model, case)) < EXACT
    assert relative_error(got, masked_dense(model, replace(case, turns=None))) > DISCRIMINATION
    if has(name, PositionedRotatingKVCache):
        assert relative_error(got, masked_dense(model, replace(case, recalls=()))) > DISCRIMINATION
    if has(name, ArraysCache):
        monkeypatch.setattr(Case, "fed", property(lambda case: case.kept))
        assert relative_error(got, masked_dense(model, case)) > DISCRIMINATION


# mistral3 has windows over full caches.
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "deepseek_v3", "mistral3"])
def test_rows_with_recalled_tokens_answer_together_what_they_answer_alone(name: str) -> None:
    model = build(name)
    rows = [prefilled(model, recalled_case(oracle.vocabulary(model), seed)) for seed in range(3)]
    expected = [list(decode(model, copy.deepcopy(cache), logits, greedy, [], 24, 3)) for cache, logits in rows]
    batch, got = DecodeBatch(model), [list[Any]() for _ in rows]
    for uid, (cache, logits) in enumerate(rows):
        batch.add(DecodeRow(uid, cache, logits, sampler=greedy, processors=[], logprobs=3))
    for _ in range(24):
        for uid, event in batch.step():
            got[uid].append(event)
    for ours, theirs in zip(got, expected, strict=True):
        assert tokens(ours) == tokens(theirs)
        assert logprob_error(ours, theirs) < bound(1e-4, 10)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "deepseek_v3"])
def test_proposals_on_top_of_recalled_tokens_are_taken_back(name: str) -> None:
    model = build(name)
    cache, _ = prefilled(model, recalled_case(oracle.vocabulary(model)))
    plain, drafted = copy.deepcopy(cache), Rollback(cache)
    mx.eval(model(mx.array([[3]]), cache=plain), drafted.forward(model, mx.array([[3, 4, 5]])))
    drafted.keep(1)
    assert_same_contents(cache, plain, atol=1e-4)
