"""Rows of positioned caches side by side, against lists of positions that are too simple to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_specprefill.cache import batched
from mlx_specprefill.cache.batched import (
    PositionedBatchKVCache,
    PositionedBatchRotatingKVCache,
    batch_key,
    can_batch,
    extend_batch,
    extract_row,
    filter_batch,
    merge_rows,
)
from mlx_specprefill.cache.positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, place
from mlx_specprefill.sampling import greedy
from tests.oracle import build
from tests.rows import alone, assert_same_contents, contents, make_rows, prefilled, tokens
from tests.tiny import VOCAB, tiny_model

WINDOW = 6


@pytest.fixture(autouse=True, scope="module")
def _small_steps() -> Iterator[None]:
    """So that storage grows within a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_STEP", 3)
        yield


def column(positions: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    """Keys (1, 1, L, 1) that say where they lie."""
    return mx.array(list(positions), dtype=dtype).reshape(1, 1, -1, 1)


def put(cache: Positioned, positions: Sequence[int]) -> None:
    if len(positions):
        place([cache], np.array(positions, dtype=np.int32))
        cache.update_and_fetch(column(positions), -column(positions))


def single(ring: bool, positions: Sequence[int] = (), chunk: int = 100) -> Positioned:
    cache: Positioned = PositionedRotatingKVCache(WINDOW) if ring else PositionedKVCache()
    for start in range(0, len(positions), chunk):
        put(cache, positions[start : start + chunk])
    return cache


def seen(mask: Any, keys: mx.array, row: int) -> list[int]:
    """The positions that a row's next token sees."""
    stored = np.array(keys)[row].reshape(-1).astype(int)
    if mask is None:
        return sorted(stored.tolist())
    return sorted(stored[np.array(mask)[row].reshape(-1)].tolist())


class Model:
    """Rows as plain lists of positions."""

    def __init__(self, ring: bool) -> None:
        self.ring = ring
        self.rows: list[list[int]] = []

    def step(self) -> None:
        for row in self.rows:
            row.append(row[-1] + 1 if row else 0)

    def visible(self, row: int, window: int | None) -> list[int]:
        """After a step: what the last token sees."""
        positions = self.rows[row][-WINDOW:] if self.ring else self.rows[row]
        reach = min(window or WINDOW, WINDOW) if self.ring else window
        return [p for p in positions if reach is None or positions[-1] - p < reach]


prompts = st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=14).map(sorted)
moves = st.one_of(
    st.tuples(st.just("join"), st.lists(prompts, min_size=1, max_size=3)),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.integers(1, 9)),
)


def decode_step(batch: list[Any], model: Model, window: int | None) -> None:
    (cache,) = batch
    assert cache.offset.tolist() == [row[-1] + 1 for row in model.rows]
    assert cache.offset.dtype == mx.int32
    mask = cache.make_mask(1, window_size=window)
    model.step()
    last = mx.array([row[-1] for row in model.rows], dtype=mx.float32).reshape(-1, 1, 1, 1)
    keys, values = cache.update_and_fetch(last, -last)
    assert mask is None or mask.shape == (len(model.rows), 1, 1, keys.shape[2])
    assert (np.array(keys) == -np.array(values)).all()
    for row in range(len(model.rows)):
        assert seen(mask, keys, row) == model.visible(row, window)
    if mask is not None:
        assert not np.array(mask).all(), "a mask that hides nothing"


def leave(batch: list[Any], model: Model, index: int, chunk: int) -> None:
    """The row that is taken out is what it would be alone; the others stay."""
    row = model.rows.pop(index)
    expected = single(model.ring, [], chunk)
    for position in row:
        put(expected, [position])
    assert_same_contents(extract_row(batch, index), [expected], atol=0)
    filter_batch(batch, [other for other in range(len(model.rows) + 1) if other != index])


@settings(max_examples=150)
@given(st.booleans(), st.sampled_from([None, 2, 4, 9]), st.integers(1, 20), st.lists(moves, max_size=12))
def test_any_schedule_sees_and_holds_what_a_list_says(
    ring: bool, window: int | None, chunk: int, schedule: list[Any]
) -> None:
    batch: list[Any] = []
    model = Model(ring)
    for name, argument in [("join", [[0, 3]]), *schedule]:
        if name == "join":
            joining = merge_rows([[single(ring, positions, chunk)] for positions in argument])
            if model.rows:
                extend_batch(batch, joining)
            else:
                batch = joining
            model.rows += [list(positions) for positions in argument]
        elif name == "leave" and model.rows:
            leave(batch, model, argument % len(model.rows), chunk)
        elif name == "step" and model.rows:
            for _ in range(argument):
                decode_step(batch, model, window)
    while model.rows:
        leave(batch, model, 0, chunk)


@pytest.mark.parametrize("ring", [False, True])
def test_a_row_that_was_taken_out_goes_on_alone(ring: bool) -> None:
    prompts = [[0, 1, 5, 9, 11], list(range(30)), [2]]
    batch = merge_rows([[single(ring, positions)] for positions in prompts])
    model = Model(ring)
    model.rows = [list(positions) for positions in prompts]
    for _ in range(WINDOW + 2):
        decode_step(batch, model, None)
    (row,) = extract_row(batch, 0)
    for _ in range(2 * WINDOW):
        mask = row.make_mask(1, window_size=None, return_array=False)
        model.step()
        keys, _ = row.update_and_fetch(column(model.rows[0][-1:]), column(model.rows[0][-1:]))
        assert seen(None if mask is None else mask[None], keys, 0) == model.visible(0, None)


def test_merging_and_taking_out_leave_their_source_as_it_is() -> None:
    sources = [[single(True, [0, 1, 7, 8])], [single(True, range(9))]]
    before = copy.deepcopy(sources)
    batch = merge_rows(sources)
    extracted = contents(extract_row(batch, 0))
    for _ in range(3):
        batch[0].update_and_fetch(mx.zeros((2, 1, 1, 1)), mx.zeros((2, 1, 1, 1)))
    for ours, theirs in zip(sources, before, strict=True):
        assert_same_contents(ours, theirs, atol=0)
    assert str(extracted) == str(contents(before[0]))


def test_only_one_token_per_row_and_step() -> None:
    (cache,) = merge_rows([[single(False, [0, 1])], [single(False, [0])]])
    with pytest.raises(ValueError, match="one token each, not 2"):
        cache.make_mask(2)
    with pytest.raises(ValueError, match="one token each, not 3"):
        cache.update_and_fetch(mx.zeros((2, 1, 3, 1)), mx.zeros((2, 1, 3, 1)))


def test_rows_of_one_length_need_no_mask() -> None:
    (cache,) = merge_rows([[single(False, [0, 4, 9])], [single(False, [1, 2, 3])]])
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True) is None
    assert cache.offset.tolist() == [10, 4]


def test_padding_goes_with_the_row_that_needed_it() -> None:
    batch = merge_rows([[single(False, range(50))], [single(False, range(7))], [single(False, range(9))]])
    filter_batch(batch, [1, 2])
    assert batch[0].size() == 9
    filter_batch(batch, [0])
    assert (batch[0].size(), batch[0].make_mask(1)) == (7, None)


def test_an_extracted_row_does_not_keep_the_batch_alive() -> None:
    others = mx.get_active_memory()  # of tests before this one
    wide = mx.zeros((1, 4, 256, 64))
    rows = []
    for _ in range(8):
        cache = PositionedKVCache()
        cache.update_and_fetch(wide, wide)
        rows.append([cache])
    mx.eval([row[0].state for row in rows])
    batch = merge_rows(rows)
    mx.eval(batch[0].state)
    del rows, cache
    before = mx.get_active_memory() - others
    row = extract_row(batch, 3)
    mx.eval(row[0].state)
    del batch
    assert mx.get_active_memory() - others < before / 4


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("ring", [False, True])
def test_dtypes_stay(ring: bool, dtype: mx.Dtype) -> None:
    rows = []
    for count in (3, 9):
        cache = single(ring)
        cache.update_and_fetch(column(range(count), dtype), column(range(count), dtype))
        rows.append([cache])
    batch = merge_rows(rows)
    extend_batch(batch, merge_rows(rows))
    one = mx.zeros((4, 1, 1, 1), dtype)
    for _ in range(8):
        fetched = batch[0].update_and_fetch(one, one)
    filter_batch(batch, [0, 3])
    (row,) = extract_row(batch, 1)
    assert {array.dtype for array in (*fetched, *batch[0].state, row.keys, row.values)} == {dtype}


# --- what can be batched ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache",
    [QuantizedKVCache(), ChunkedKVCache(8), RotatingKVCache(8, keep=2), CacheList(KVCache(), ChunkedKVCache(8))],
)
def test_caches_without_a_batch_form(cache: Any) -> None:
    assert not can_batch([PositionedKVCache(), cache])


def test_caches_with_one() -> None:
    positioned = [PositionedKVCache(), CacheList(PositionedRotatingKVCache(8), ArraysCache(2))]
    stock = [KVCache(), CacheList(RotatingKVCache(8), ArraysCache(2))]
    assert can_batch(positioned)
    assert can_batch(stock)
    wider = [PositionedKVCache(), CacheList(PositionedRotatingKVCache(9), ArraysCache(2))]
    keys = [batch_key(cache) for cache in (positioned, stock, wider)]
    assert len(set(keys)) == 3
    assert batch_key(copy.deepcopy(positioned)) == keys[0]


def test_composites_keep_their_shape() -> None:
    def row(length: int) -> list[Any]:
        state = ArraysCache(3)
        state[0] = mx.full((1, 2), length)
        return [CacheList(single(False, range(length)), state, single(True, range(length)))]

    (batch,) = merge_rows([row(3), row(8)])
    kinds = [type(part) for part in batch.caches]
    assert kinds == [PositionedBatchKVCache, ArraysCache, PositionedBatchRotatingKVCache]
    extend_batch([batch], merge_rows([row(5)]))
    filter_batch([batch], [2, 0])
    assert_same_contents(extract_row([batch], 0), row(5), atol=0)
    assert_same_contents(extract_row([batch], 1), row(3), atol=0)


def test_layers_that_no_forward_writes_to() -> None:
    batch = merge_rows([[PositionedKVCache()], [PositionedKVCache()]])
    extend_batch(batch, merge_rows([[PositionedKVCache()]]))
    filter_batch(batch, [0, 2])
    assert batch[0].empty()
    assert extract_row(batch, 1)[0].empty()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_5"])
def test_mlx_lms_own_caches_are_batched_by_mlx_lm(name: str) -> None:
    """For whoever serves dense prompts only."""
    model = build(name)
    prompts = [row.prompt for row in make_rows(90, 3, sparse=False)]
    caches, answers = [], []
    for prompt in prompts:
        cache = make_prompt_cache(model)
        logits = model(mx.array(prompt)[None], cache=cache)[:, -1]
        caches.append(copy.deepcopy(cache))
        answers.append(continue_with(model, cache, logits))
    batch = merge_rows(caches)
    logits = mx.concatenate([answer[0] for answer in answers])
    np.testing.assert_allclose(
        np.array(continue_with(model, batch, logits)[-1]),
        np.concatenate([np.array(answer[-1]) for answer in answers]),
        atol=1e-5,
    )
    for index, answer in enumerate(answers):
        np.testing.assert_allclose(
            np.array(continue_with(model, extract_row(batch, index), answer[-1])[-1]),
            np.array(continue_with(model, caches[index], answer[0], 24)[-1]),
            atol=1e-5,
        )


def continue_with(model: Any, cache: list[Any], logits: mx.array, count: int = 12) -> list[mx.array]:
    """Greedy steps; the logits of each."""
    rows = [logits]
    for _ in range(count):
        rows.append(model(greedy(rows[-1])[:, None], cache=cache)[:, -1])
        mx.eval(rows[-1])
    return rows


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
def test_mlx_lms_generation_batch_decodes_them(family: str) -> None:
    """They speak its protocol: rows are extended, filtered and extracted by its own code."""
    model = tiny_model(family)
    rows = make_rows(VOCAB, 4)
    expected = [tokens(alone(model, row, 31)[0])[1:] for row in rows]  # it returns what follows its input

    def generation(chosen: list[int], counts: list[int]) -> GenerationBatch:
        ready = [prefilled(model, rows[index]) for index in chosen]
        return GenerationBatch(
            model,
            chosen,
            mx.concatenate([greedy(logits) for _, logits in ready]),
            merge_rows([cache for cache, _ in ready]),
            [[] for _ in chosen],
            [greedy] * len(chosen),
            greedy,
            [[] for _ in chosen],
            [StopSequences([])] * len(chosen),
            counts,
        )

    batch, got = generation([0, 1], [30, 11]), {index: [] for index in range(4)}
    for step in range(45):
        if step == 5:
            batch.extend(generation([2, 3], [30, 30]))
        for response in batch.next():
            got[response.uid].append(response.token)
    assert got == {0: expected[0], 1: expected[1][:11], 2: expected[2], 3: expected[3]}
