"""P6: every row of a batch answers what it answers alone.

Rows are sparse and dense, shorter and longer than the windows, join and leave at different steps. The reference is
`tests.support.autoregressive` on the row's own cache, float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_specprefill.adapters.registry import adapter_for
from mlx_specprefill.cache.merging import can_share
from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.engine.prefixes.caches import empty_cache
from tests.support import oracle
from tests.support.autoregressive import decode
from tests.support.oracle import build, tiny_models, vocabulary
from tests.support.refusals import BATCH_REFUSALS
from tests.support.rows import ROUNDED, Row, alone, logprob_error, make_rows, quantised_row, together, tokens
from tests.support.tiny import FAMILIES, tiny_model

CLOSE = 1e-4
COUNT = 64
JOINS = (0, 0, 0, 3, 3, 10, 31, 70)  # the last one finds a batch that most rows have left
RUNNABLE = [name for name, tiny in tiny_models().items() if tiny.architecture not in {*BATCH_REFUSALS}]
# Those of the tiny models with full attention and heads that divide by it. mlx-lm's gemma2 can't read such caches.
QUANTISED = [
    *("Klear", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "hunyuan"),
    *("hunyuan_v1_dense", "jamba", "lfm2-vl", "lille-130m", "mimo", "nemotron", "olmo2", "olmoe", "phimoe", "qwen3"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_next+gqa", "qwen3_vl", "qwen3_vl_moe", "seed_oss"),
    "solar_open",
]
MORE = ("gemma3_text", "deepseek_v3", "qwen3_next", "lfm2", "ministral3", "llama+dynamic")


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


def sparse_allowed(name: str) -> bool:
    return adapter_for(tiny_models()[name].architecture).sparse_refusal is None


@pytest.mark.extended
@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_eight_mixed_rows_answer_64_tokens_as_alone(name: str) -> None:
    model = tiny_model(name) if name in FAMILIES else build(name)
    rows = make_rows(vocabulary(model), 8)
    assert sum(row.kept is not None for row in rows) == 4
    events, _ = together(model, rows, JOINS, [COUNT] * 8)
    for uid, row in enumerate(rows):
        expected, _ = alone(model, row, COUNT)
        assert tokens(events[uid]) == tokens(expected)
        assert logprob_error(events[uid], expected) < CLOSE


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_architecture_that_is_batched(name: str) -> None:
    """Or whose caches make it decode one by one; windows wrap, and rows join and leave around it."""
    model = build(name)
    rows = make_rows(vocabulary(model), 3, seed=5, sparse=sparse_allowed(name))
    counts = [8, 4, 6]
    events, _ = together(model, rows, [0, 1, 3], counts)
    for uid, row in enumerate(rows):
        expected, _ = alone(model, row, counts[uid])
        assert tokens(events[uid]) == tokens(expected)
        assert logprob_error(events[uid], expected) < CLOSE


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUANTISED)
def test_every_architecture_whose_caches_are_quantised(name: str) -> None:
    model = build(name)
    rows = make_rows(vocabulary(model), 4, seed=5, sparse=sparse_allowed(name))

    def made(model: nn.Module, uid: int, row: Row) -> DecodeRow:
        return quantised_row(model, uid, row, 8)

    assert can_share(made(model, 0, rows[0]).cache)
    counts = [12, 5, 9, 12]
    events, _ = together(model, rows, [0, 0, 1, 3], counts, made=made)
    for uid, row in enumerate(rows):
        spec = made(model, uid, row)
        expected = list(decode(model, spec.cache, spec.logits, greedy, [], counts[uid], 3, spec.shift))
        assert tokens(events[uid]) == tokens(expected)
        assert logprob_error(events[uid], expected) < ROUNDED


@pytest.mark.parametrize("architecture", sorted(BATCH_REFUSALS))
def test_no_architecture_is_kept_out_without_grounds(architecture: str) -> None:
    """It can't be built here, raises, or mixes its rows up."""
    if architecture in oracle.UNBUILDABLE:
        return
    model = build(architecture)
    batch = DecodeBatch(model)
    assert not batch._batched
    batch._batched = True
    try:
        rows = make_rows(vocabulary(model), 3, seed=5, sparse=False)
        events, _ = together(model, rows, [0, 0, 0], [8] * 3, batch)
    except Exception:  # noqa: BLE001 - what it raises is its grounds
        return
    assert any(logprob_error(events[uid], alone(model, row, 8)[0]) > CLOSE for uid, row in enumerate(rows))


@pytest.mark.extended
def test_what_is_batched_can_be() -> None:
    """The property would be vacuous for caches that decode one by one."""
    batched = {name for name in RUNNABLE if can_share(empty_cache(build(name)))}
    assert set(RUNNABLE) - batched == {"deepseek_v41", "llama4"}
