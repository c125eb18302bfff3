"""Rows of positioned caches side by side, against lists of positions that are too simple to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_specprefill.cache import batched
from mlx_specprefill.cache.positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, place
from mlx_specprefill.cache.rows import (
    batch_key,
    extend_batch,
    extract_row,
    filter_batch,
    give_back,
    make_room,
    merge_rows,
)
from mlx_specprefill.sampling import greedy
from tests.support.examples import examples
from tests.support.oracle import build
from tests.support.precision import assert_close
from tests.support.rows import assert_same_contents, make_rows

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
    chunk = chunk if list(positions) == sorted(positions) else 1
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
            row.append(max(row, default=-1) + 1)

    def visible(self, row: int, window: int | None) -> list[int]:
        """After a step: what the last token sees."""
        positions = self.rows[row][-WINDOW:] if self.ring else self.rows[row]
        reach = min(window or WINDOW, WINDOW) if self.ring else window
        return sorted(p for p in positions if reach is None or positions[-1] - p < reach)


recalled = st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=14)  # fed one by one, in this order
prompts = recalled.map(sorted) | recalled
moves = st.one_of(
    st.tuples(st.just("join"), st.lists(prompts, min_size=1, max_size=3)),
    st.tuples(st.just("merge"), st.lists(prompts, min_size=2, max_size=3)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 9)),
    st.tuples(st.just("room"), prompts),
    st.tuples(st.just("compact"), st.none()),
)


def decode_step(batch: list[Any], model: Model, window: int | None) -> None:
    (cache,) = batch
    assert cache.offset.tolist() == [max(row) + 1 for row in model.rows]
    assert cache.offset.dtype == mx.int32
    mask = cache.make_mask(1, window_size=window)
    model.step()
    last = mx.array([row[-1] for row in model.rows], dtype=mx.float32).reshape(-1, 1, 1, 1)
    keys, values = cache.update_and_fetch(last, -last)
    assert mask is None or mask.shape == (len(model.rows), 1, 1, keys.shape[2])
    assert cache.size() == keys.shape[2]
    assert (np.array(keys) == -np.array(values)).all()
    for row in range(len(model.rows)):
        assert seen(mask, keys, row) == model.visible(row, window)
    if mask is not None:
        assert not np.array(mask).all(), "a mask that hides nothing"


def others(index: int, count: int, swap: bool) -> list[int]:
    """The rows that stay when one leaves: in order, or with the last one in its place."""
    rows = list(range(count))
    if swap:
        rows[index], rows[-1] = rows[-1], rows[index]
        return rows[:-1]
    return rows[:index] + rows[index + 1 :]


def leave(batch: list[Any], model: Model, index: int, swap: bool = False) -> None:
    """The row that is taken out, and each that stays, is what it would be alone."""
    assert_same_contents(extract_row(batch, index), [decoded_alone(model, index)], atol=0)
    keep = others(index, len(model.rows), swap)
    filter_batch(batch, keep)
    model.rows = [model.rows[row] for row in keep]
    for row in range(len(model.rows)):
        assert_same_contents(extract_row(batch, row), [decoded_alone(model, row)], atol=0)


def decoded_alone(model: Model, row: int) -> Positioned:
    cache = single(model.ring)
    for position in model.rows[row]:
        put(cache, [position])
    return cache


@pytest.mark.extended
@settings(max_examples=examples(300))
@given(
    st.booleans(),
    st.sampled_from([None, 2, 4, 9]),
    st.integers(1, 20),
    st.sampled_from([0, 300, 1 << 20]),
    st.lists(moves, max_size=16),
)
def test_any_schedule_sees_and_holds_what_a_list_says(
    ring: bool, window: int | None, chunk: int, idle: int, schedule: list[Any]
) -> None:
    """With rows and slots that lie idle, few of them, and none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_IDLE_BYTES", idle)
        follow(ring, window, chunk, schedule)


def follow(ring: bool, window: int | None, chunk: int, schedule: list[Any]) -> None:
    batch: list[Any] = []
    model = Model(ring)
    for name, argument in [("join", [[0, 3]]), *schedule]:
        if name == "join":
            argument = [sorted(positions) if ring else positions for positions in argument]
            joining = merge_rows([[single(ring, positions, chunk)] for positions in argument])
            if model.rows:
                extend_batch(batch, joining)
            else:
                batch = joining
            model.rows += [list(positions) for positions in argument]
        elif name == "merge" and model.rows:  # with rows that have decoded together already
            fresh = Model(ring)
            fresh.rows = [sorted(positions) if ring else list(positions) for positions in argument]
            other = merge_rows([[single(ring, positions, chunk)] for positions in fresh.rows])
            for _ in range(len(argument[0])):
                decode_step(other, fresh, window)
            extend_batch(batch, other)
            model.rows += fresh.rows
        elif name == "leave" and model.rows:
            leave(batch, model, argument % len(model.rows), swap=argument % 3 != 0)
        elif name == "step" and model.rows:
            for _ in range(argument):
                decode_step(batch, model, window)
        elif name == "room" and len(model.rows) > 1:
            assert make_room(batch, 2, [single(ring, sorted(argument), chunk)])
        elif name == "compact" and len(model.rows) > 1:
            give_back(batch)
            assert not batch[0].oversized
        if model.rows:  # `oversized` relies on it at every step, without a look at the rows
            assert batch[0]._first == batch[0]._unused_slots(batch[0]._rows)
            held = [min(len(row), WINDOW) if ring else len(row) for row in model.rows]
            assert batch[0].row_bytes == [8 * count for count in held]  # a key and a value in float32
            capacity, _, slots, _ = batch[0].keys.shape
            own = len(held) * slots if ring else sum(held) + len(held) * (slots - batch[0]._end)
            assert batch[0].padding == 8 * (capacity * slots - own) >= 0
    while model.rows:
        leave(batch, model, 0)


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


def test_only_one_token_per_row_and_step() -> None:
    (cache,) = merge_rows([[single(False, [0, 1])], [single(False, [0])]])
    with pytest.raises(ValueError, match="one token each, not 2"):
        cache.make_mask(2)
    with pytest.raises(ValueError, match="one token each, not 3"):
        cache.update_and_fetch(mx.zeros((2, 1, 3, 1)), mx.zeros((2, 1, 3, 1)))


def test_an_extracted_row_does_not_keep_the_batch_alive() -> None:
    held = mx.get_active_memory()  # of tests before this one
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
    before = mx.get_active_memory() - held
    row = extract_row(batch, 3)
    mx.eval(row[0].state)
    del batch
    assert mx.get_active_memory() - held < before / 4


# --- in place ---------------------------------------------------------------------------------------------------------


def wide_rows(counts: Sequence[int], ring: bool = False) -> list[list[Any]]:
    """2 KiB a token, keys and values."""
    rows = []
    for count in counts:
        cache = PositionedRotatingKVCache(512) if ring else PositionedKVCache()
        arrays = mx.random.normal((2, 1, 4, count, 64))
        cache.update_and_fetch(arrays[0], arrays[1])
        rows.append([cache])
    mx.eval([row[0].state for row in rows])
    return rows


def wide_step(batch: list[Any]) -> None:
    one = mx.ones((batch[0].offset.size, 4, 1, 64))
    mx.eval(batch[0].update_and_fetch(one, one))


def peak(act: Callable[[], Any]) -> int:
    """Bytes that something takes beyond what there is."""
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    act()
    mx.synchronize()
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("ring", [False, True])
def test_joining_and_leaving_copy_one_row(ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventeen rows: a shorter one joins, and one that is longer than all others but fits the free slots in front."""
    monkeypatch.setattr(batched, "_STEP", 64)
    batch = merge_rows(wide_rows([512, *[450] * 15], ring))
    wide_step(batch)
    extend_batch(batch, merge_rows(wide_rows([300], ring)))  # the batch has no spare row yet
    wide_step(batch)
    whole, row = batch[0].nbytes, batch[0].nbytes // batch[0].keys.shape[0]
    joining = [merge_rows(wide_rows([count], ring)) for count in (200, 480)]
    mx.eval([part.state for other in joining for part in other])

    def change(act: Callable[[], Any]) -> int:
        def both() -> None:
            act()
            wide_step(batch)

        return peak(both)

    for swapped in (0, 5):
        assert change(lambda index=swapped: filter_batch(batch, others(index, count_of(batch), True))) < 2 * row
    for other in joining:
        assert change(lambda other=other: extend_batch(batch, other)) < 4 * row
    assert batch[0].nbytes == whole
    assert whole > 16 * row


def count_of(batch: list[Any]) -> int:
    return int(batch[0].offset.size)


def test_room_is_made_layer_by_layer_and_a_newcomer_then_copies_itself() -> None:
    rows = [[wide_rows([count])[0][0] for _ in range(4)] for count in (400, 350, 300, 300, 300, 300)]
    batch = merge_rows(rows)
    mx.eval([part.state for part in batch])
    longest = [wide_rows([500])[0][0] for _ in range(4)]
    layer = batch[0].nbytes * 8 * 500 // (6 * 400)  # with the rows and slots that it then has
    done: list[bool] = []
    while not done or not done[-1]:
        assert peak(lambda: done.append(make_room(batch, 1, longest, until=0))) < 2 * layer
    assert done == [False, False, False, True]
    alone, sizes = merge_rows([longest]), [part.nbytes for part in batch]
    mx.eval([part.state for part in alone])

    def join() -> None:
        extend_batch(batch, alone)
        mx.eval([part.state for part in batch])

    assert peak(join) < 2 * layer
    assert [part.nbytes for part in batch] == sizes


def test_what_lies_idle_is_bounded() -> None:
    """By half of the batch, whoever leaves: the longest row, or most rows."""
    batch = merge_rows(wide_rows([2000, *[100] * 8]))
    wide_step(batch)
    filter_batch(batch, others(0, 9, True))
    give_back(batch)
    assert batch[0].nbytes <= 2 * merge_rows(wide_rows([101] * 8))[0].nbytes
    for count in range(8, 2, -1):
        filter_batch(batch, others(1, count, True))
        give_back(batch)
    assert batch[0].nbytes <= 2 * merge_rows(wide_rows([101] * 2))[0].nbytes


@pytest.mark.parametrize("ring", [False, True])
def test_nothing_of_a_row_that_left_shows_through_a_mask(ring: bool) -> None:
    """Attention weighs what is hidden with 0, and 0 times infinity is no number."""
    batch = merge_rows([[single(ring, range(5))] for _ in range(4)])
    bad = mx.full((4, 1, 1, 1), float("inf"))
    batch[0].update_and_fetch(bad, bad)
    filter_batch(batch, [0, 3, 2])
    filter_batch(batch, [0, 1])
    extend_batch(batch, merge_rows([[single(ring, [4])]]))
    extend_batch(batch, merge_rows([[single(ring, [7, 9])]]))
    for _ in range(8):
        keys, values = batch[0].update_and_fetch(mx.zeros((4, 1, 1, 1)), mx.zeros((4, 1, 1, 1)))
        assert np.isfinite(np.array(keys[2:])).all()
        assert np.isfinite(np.array(values[2:])).all()


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
    [ChunkedKVCache(8), RotatingKVCache(8, keep=2), CacheList(KVCache(), ChunkedKVCache(8))],
)
def test_caches_without_a_batch_form(cache: Any) -> None:
    assert batch_key([PositionedKVCache(), cache]) is None


def test_caches_with_one() -> None:
    positioned = [PositionedKVCache(), CacheList(PositionedRotatingKVCache(8), ArraysCache(2))]
    stock = [KVCache(), CacheList(RotatingKVCache(8), ArraysCache(2))]
    assert batch_key(positioned) is not None
    assert batch_key(stock) is not None
    wider = [PositionedKVCache(), CacheList(PositionedRotatingKVCache(9), ArraysCache(2))]
    keys = [batch_key(cache) for cache in (positioned, stock, wider)]
    assert len(set(keys)) == 3
    assert batch_key(copy.deepcopy(positioned)) == keys[0]


@pytest.mark.extended
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
    assert_close(continue_with(model, batch, logits)[-1], mx.concatenate([answer[-1] for answer in answers]), atol=1e-5)
    for index, answer in enumerate(answers):
        ours = continue_with(model, extract_row(batch, index), answer[-1])[-1]
        assert_close(ours, continue_with(model, caches[index], answer[0], 24)[-1], atol=1e-5)


def continue_with(model: Any, cache: list[Any], logits: mx.array, count: int = 12) -> list[mx.array]:
    """Greedy steps; the logits of each."""
    rows = [logits]
    for _ in range(count):
        rows.append(model(greedy(rows[-1])[:, None], cache=cache)[:, -1])
        mx.eval(rows[-1])
    return rows
