"""Chunks that are read into a sparse cache afterwards: the masked dense run in which earlier turns don't see them.

Every architecture takes part whose layers keep all that they were fed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.cache.positioned import make_positioned_cache, next_position, place
from mlx_specprefill.sessions.repair import insert
from mlx_specprefill.sessions.splice import can_splice
from mlx_specprefill.specprefill.sparse_prefill import prefill
from tests import oracle
from tests.oracle import EXACT, Case, build, can_repair, make_case, masked_dense, relative_error
from tests.properties.test_sparse_equals_masked import DISCRIMINATION, NAMED, VERIFIED
from tests.slices import finish

SPLICED = [name for name in VERIFIED if can_repair(name)]
END = 64  # of the earlier turn; the last of its kept tokens lies before it


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with oracle.on_the_cpu_unfused():
        yield


def repaired_case(vocab: int, seed: int = 0) -> Case:
    """Of the tokens kept before `END`, runs and single ones come in the second turn, others in a third."""
    case = make_case(vocab, keep=0.5, seed=seed)
    turns = np.where(np.arange(case.prompt.size) < END, 0, 3)
    early = case.kept[case.kept < END]
    turns[early[2:6]], turns[early[9]], turns[early[-1]] = 1, 1, 1
    turns[early[4:8]], turns[early[12:14]] = 2, 2
    return replace(case, turns=turns.astype(np.int32))


def repaired(model: object, case: Case, step: int) -> np.ndarray:
    """The library: an earlier turn, two repairs, and what is new on top."""
    cache = make_positioned_cache(model)
    of = [case.kept[case.turns[case.kept] == turn] for turn in range(4)]
    place(cache, of[0])
    mx.eval(model(mx.array(case.prompt[of[0]])[None], cache=cache))
    for missing in of[1:3]:
        finish(insert(model, cache, case.prompt.tolist(), missing, lambda: step))
        assert next_position(cache) == max(of[0][-1], missing[-1], of[1][-1]) + 1
    rows = [finish(prefill(model, cache, case.prompt[END:].tolist(), of[3] - END, 11, offset=END))[0]]
    for token in case.continuation.tolist():
        rows.append(model(mx.array([[token]]), cache=cache)[0, -1])
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


def test_the_families_with_nothing_but_full_attention_take_part() -> None:
    assert {"llama", "qwen3", "qwen3_moe", "deepseek_v3"} <= set(SPLICED)
    assert len(SPLICED) >= 50
    assert {"qwen3_5", "nemotron_h", "gpt_oss", "gemma3_text"}.isdisjoint(SPLICED)
    assert not can_splice([])
    assert not can_splice(make_prompt_cache(build("llama")))


@pytest.mark.parametrize("name", SPLICED)
def test_repaired_caches_equal_the_masked_dense_run(name: str) -> None:
    model = build(name)
    case = repaired_case(oracle.vocabulary(model))
    assert relative_error(repaired(model, case, 3), masked_dense(model, case)) < EXACT


@pytest.mark.parametrize("name", [name for name in NAMED if name in SPLICED])
def test_a_restart_is_another_law(name: str) -> None:
    """The oracle can fail: with everything fed in one turn, the tokens behind would have seen what was put in."""
    model = build(name)
    case = repaired_case(oracle.vocabulary(model), seed=2)
    got = repaired(model, case, 64)
    assert relative_error(got, masked_dense(model, case)) < EXACT
    assert relative_error(got, masked_dense(model, replace(case, turns=None))) > DISCRIMINATION
