"""Rows of quantised caches side by side, against mlx-lm's cache of every row alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache

from mlx_specprefill.cache import batched
from mlx_specprefill.cache.positioned import PositionedKVCache
from mlx_specprefill.cache.rows import (
    batch_key,
    extend_batch,
    extract_row,
    filter_batch,
    give_back,
    make_room,
    merge_rows,
)
from mlx_specprefill.engine.footprint import cache_bytes

GROUP, HEADS, D = 32, 2, 64
CLOSE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _small_steps() -> Iterator[None]:
    """So that storage grows within a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_STEP", 3)
        yield


def single(count: int, bits: int = 8, dtype: mx.Dtype = mx.float32) -> QuantizedKVCache:
    """With random tokens."""
    cache = QuantizedKVCache(group_size=GROUP, bits=bits)
    if count:
        cache.update_and_fetch(*new_tokens(1, count, dtype))
    return cache


def new_tokens(rows: int, count: int, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, rows, HEADS, count, D)).astype(dtype)
    mx.eval(keys, values)
    return keys, values


def stored(cache: Any) -> list[Any]:
    """Six arrays: packed values, scales and biases of keys and of values."""
    if cache.offset == 0:
        return []
    return [np.array(part) for array in cache.keys_and_values() for part in array]


def assert_same_triples(ours: QuantizedKVCache, theirs: QuantizedKVCache) -> None:
    assert (ours.offset, ours.bits, ours.group_size) == (theirs.offset, theirs.bits, theirs.group_size)
    for mine, other in zip(stored(ours), stored(theirs), strict=True):
        np.testing.assert_array_equal(mine, other)


def attend(cache: Any, queries: mx.array, keys: mx.array, values: mx.array, window: int | None) -> np.ndarray:
    """As models do it: the mask, then the update, then attention over what it returns."""
    mask = create_attention_mask(queries.swapaxes(1, 2), cache, window_size=window)
    fetched = cache.update_and_fetch(keys, values)
    return np.array(scaled_dot_product_attention(mx.array(queries), *fetched, cache=cache, scale=0.3, mask=mask))


def step(batch: Any, rows: Sequence[QuantizedKVCache], repeats: int, window: int | None) -> None:
    """One token of every row; attention sees what it sees alone."""
    assert batch.offset.tolist() == [row.offset for row in rows]
    keys, values = new_tokens(len(rows), 1)
    queries = mx.random.normal((len(rows), repeats * HEADS, 1, D))
    together = attend(batch, queries, keys, values, window)
    for index, row in enumerate(rows):
        at = slice(index, index + 1)
        np.testing.assert_allclose(
            together[at], attend(row, queries[at], keys[at], values[at], window), rtol=0, atol=CLOSE
        )


moves = st.one_of(
    st.tuples(st.just("join"), st.lists(st.integers(0, 14), min_size=1, max_size=3)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("room"), st.integers(1, 14)),
    st.tuples(st.just("compact"), st.none()),
)


@pytest.mark.extended
@settings(max_examples=60)
@given(
    st.sampled_from([8, 6, 4, 3]),
    st.sampled_from([1, 3]),
    st.sampled_from([None, 4]),
    st.sampled_from([0, 4000, 1 << 20]),
    st.lists(moves, max_size=12),
)
def test_any_schedule_sees_and_holds_what_rows_alone_do(
    bits: int, repeats: int, window: int | None, idle: int, schedule: list[Any]
) -> None:
    """With as many query heads as keys have, and three times as many; with and without spare rows and slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_IDLE_BYTES", idle)
        follow(bits, repeats, window, schedule)


def follow(bits: int, repeats: int, window: int | None, schedule: list[Any]) -> None:
    rows = [single(count, bits) for count in (5, 2)]
    batch = merge_rows([[row] for row in rows])
    rows = copy.deepcopy(rows)
    for name, argument in schedule:
        if name == "join":
            joining = [single(count, bits) for count in argument]
            rows += copy.deepcopy(joining)
            extend_batch(batch, merge_rows([[row] for row in joining]))
        elif name == "leave" and len(rows) > 1:
            leave(batch, rows, argument % len(rows))
        elif name == "step":
            for _ in range(argument):
                step(batch[0], rows, repeats, window)
        elif name == "room":
            assert make_room(batch, 1, [single(argument, bits)])
            assert batch[0].arrays == [] or batch[0].fits(1, argument)
        elif name == "compact":
            give_back(batch)
    for index, row in enumerate(rows):
        assert_same_triples(extract_row(batch, index)[0], row)


def leave(batch: list[Any], rows: list[QuantizedKVCache], index: int) -> None:
    """The last row takes its place."""
    assert_same_triples(extract_row(batch, index)[0], rows[index])
    keep = list(range(len(rows) - 1))
    if index < len(keep):
        keep[index] = len(keep)
    filter_batch(batch, keep)
    rows[:] = [rows[row] for row in keep]


def test_all_that_it_holds_is_counted() -> None:
    """Slots that grow and spare rows too; 8 bits and two float32 per 32 values are a third of float32."""
    rows = [[single(count)] for count in (500, 300, 200, 100)]
    mx.eval([row[0].state for row in rows])
    before = mx.get_active_memory()
    batch = merge_rows(rows[:3])
    extend_batch(batch, merge_rows(rows[3:]))
    mx.eval(batch[0].update_and_fetch(*new_tokens(4, 1)))
    mx.synchronize()
    held = mx.get_active_memory() - before
    assert abs(held - cache_bytes(batch)) < 64 << 10
    capacity, _, slots, _ = batch[0].arrays[0].shape
    assert cache_bytes(batch) == capacity * HEADS * slots * 2 * D * 10 // 8


@pytest.mark.parametrize("other", [QuantizedKVCache(64, 8), QuantizedKVCache(32, 4), PositionedKVCache()])
def test_only_rows_of_the_same_bits_and_groups_are_batched(other: Any) -> None:
    key = batch_key([QuantizedKVCache(32, 8)])
    assert key == batch_key([single(7)])
    assert None not in (key, batch_key([other]))
    assert key != batch_key([other])


def test_nothing_of_a_row_that_left_shows_through_a_mask() -> None:
    """Attention weighs what is hidden with 0, and 0 times infinity is no number."""
    batch = merge_rows([[single(5)] for _ in range(4)])
    bad = mx.full((4, HEADS, 1, D), float("inf"))
    batch[0].update_and_fetch(bad, bad)
    filter_batch(batch, [0, 3, 2])
    filter_batch(batch, [0, 1])
    extend_batch(batch, merge_rows([[single(1)], [single(2)]]))
    for _ in range(8):
        keys, values = batch[0].update_and_fetch(*new_tokens(4, 1))
        for part in (*keys[1:], *values[1:]):
            assert np.isfinite(np.array(part[2:])).all()


def test_models_may_tie_other_work_to_its_keys() -> None:
    """As those that run on several machines do."""
    batch = merge_rows([[single(4)], [single(7)]])
    before = [stored(extract_row(batch, row)[0]) for row in range(2)]
    batch[0].keys = mx.depends(batch[0].keys, mx.zeros(1))
    batch[0].values = mx.depends(batch[0].values, mx.zeros(1))
    for row, arrays in enumerate(before):
        for ours, theirs in zip(stored(extract_row(batch, row)[0]), arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)
