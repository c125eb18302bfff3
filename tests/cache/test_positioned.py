"""A cache that keeps positions apart from slots, against lists and sets that are too simple to be wrong."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlx_specprefill.adapters.rotation import adjust_offsets
from mlx_specprefill.cache import positioned
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.positioned import (
    Positioned,
    PositionedKVCache,
    PositionedRotatingKVCache,
    leaves,
    make_positioned_cache,
    place,
    quantize_kv,
)
from mlx_specprefill.errors import SparseUnsupportedError
from tests.support.oracle import build, cache_arrays, feed, make_case
from tests.support.rows import next_position, shift_of

ascending = st.lists(st.integers(0, 60), unique=True, max_size=25).map(sorted)
fed = st.lists(st.integers(0, 60), unique=True, max_size=25) | ascending  # recalled positions are not in order


def array(positions: Sequence[int]) -> np.ndarray:
    return np.array(positions, dtype=np.int32)


def make_held(positions: Sequence[int]) -> HeldTokens:
    """Return tokens at these positions, of which every other run of five is estimated."""
    return HeldTokens.of(marked(positions))


def marked(positions: Sequence[int]) -> np.ndarray:
    return array([~position if position // 5 % 2 else position for position in positions])


def agrees(held: HeldTokens, positions: Sequence[int]) -> bool:
    """They say what the list says, and the runs are maximal."""
    runs, ours = held.runs(), marked(positions).tolist()
    maximal = all(a + n != b or x != y for (a, n, x), (b, _, y) in pairwise(runs))
    dense = list(takewhile(lambda pair: pair[0] == pair[1], enumerate(ours)))
    return (
        held.positions.tolist() == list(positions)
        and held.marked.tolist() == ours
        and held.size == len(positions)
        and held.end == (positions[-1] + 1 if positions else 0)
        and held.dense == len(dense)
        and held.contiguous == (len(runs) <= 1)
        and maximal
        and all(count > 0 for _, count, _ in runs)
    )


# --- tokens ----------------------------------------------------------------------------------------------------------


@given(fed, st.integers(1, 24))
def test_tokens_are_held_in_the_order_of_feeding(positions: list[int], cut: int) -> None:
    held = make_held(positions[:cut])
    for position in marked(positions[cut:]).tolist():
        held.append(max(position, ~position), 1, position < 0)
    assert agrees(held, positions)
    assert agrees(HeldTokens(held.runs()), positions)


@given(fed, st.integers(0, 30))
def test_keep_last(positions: list[int], count: int) -> None:
    held = make_held(positions)
    held.keep_last(count)
    assert agrees(held, positions[max(0, len(positions) - count) :])


@given(fed, st.integers(0, 70))
def test_drop_from(positions: list[int], bound: int) -> None:
    """A recall that was fed after the first of them goes too."""
    held = make_held(positions)
    dropped = held.drop_from(bound)
    kept = list(takewhile(lambda position: position < bound, positions))
    assert dropped == len(positions) - len(kept)
    assert agrees(held, kept)


@given(ascending, st.integers(0, 5), st.integers(0, 6))
def test_append_after_the_end(positions: list[int], gap: int, count: int) -> None:
    held = make_held(positions)
    start = held.end + gap
    for position in range(start, start + count):
        held.append(position, 1, position // 5 % 2 == 1)
    assert agrees(held, [*positions, *range(start, start + count)])


def test_changing_a_copy_leaves_the_original() -> None:
    held = make_held([1, 2, 7])
    HeldTokens(held.runs()).keep_last(1)
    assert agrees(held, [1, 2, 7])


# --- placing ---------------------------------------------------------------------------------------------------------


def tokens(count: int) -> mx.array:
    return mx.zeros((1, 1, count, 2))


def put(cache: Positioned, positions: Sequence[int]) -> None:
    place([cache], array(positions))
    cache.update_and_fetch(tokens(len(positions)), tokens(len(positions)))


@pytest.fixture(params=[PositionedKVCache, lambda: PositionedRotatingKVCache(8)], ids=["full", "window"])
def cache(request: pytest.FixtureRequest) -> Positioned:
    made: Positioned = request.param()
    return made


def test_offsets_are_integers_where_there_is_no_gap(cache: Positioned) -> None:
    assert cache.offset == 0
    place([cache], array([0, 1, 2]))
    assert cache.offset == 0
    put(cache, [0, 1, 2])
    assert cache.offset == 3
    place([cache], array([10, 11]))
    assert cache.offset == 10
    put(cache, [10, 11])
    assert (cache.offset, cache.slots, cache.shift, cache.next) == (12, 5, 7, 12)


def test_offsets_are_a_matrix_only_while_tokens_with_gaps_are_fed(cache: Positioned) -> None:
    place([cache], array([1, 2, 5]))
    assert isinstance(cache.offset, mx.array)
    assert cache.offset.tolist() == [[1, 2, 5]]
    assert cache.offset.dtype == mx.int32
    put(cache, [1, 2, 5])
    assert cache.offset == 6


def test_tokens_that_were_not_placed_follow_the_last_position(cache: Positioned) -> None:
    put(cache, [4, 9])
    cache.update_and_fetch(tokens(2), tokens(2))
    cache.update_and_fetch(tokens(1), tokens(1))
    assert (cache.offset, cache.slots, cache.shift) == (13, 5, 8)
    assert cache.held.positions.tolist() == [4, 9, 10, 11, 12]


def test_placing_nothing_or_on_both_sides_of_the_end_is_an_error(cache: Positioned) -> None:
    put(cache, [4, 9])
    for wrong in ([], [9, 10], [2, 10]):
        with pytest.raises(ValueError, match="must be non-empty and all follow, or all precede"):
            place([cache], array(wrong))


def test_recalled_tokens_leave_the_next_position_as_it_is(cache: Positioned) -> None:
    put(cache, [0, 1, 10])
    place([cache], array([3, 4]))
    assert (cache.offset, cache.next) == (3, 11)
    put(cache, [3, 4])
    place([cache], array([6, 8]))
    assert cache.offset.tolist() == [[6, 8]]
    put(cache, [6, 8])
    assert (cache.offset, cache.next, cache.slots, cache.shift) == (11, 11, 7, 4)
    cache.update_and_fetch(tokens(1), tokens(1))
    assert cache.held.runs() == [
        (start, count, False) for start, count in ((0, 2), (10, 1), (3, 2), (6, 1), (8, 1), (11, 1))
    ]
    restored = type(cache).from_state(cache.state)
    assert (restored.next, restored.held.runs()) == (cache.next, cache.held.runs())


def test_a_forward_of_another_length_is_an_error(cache: Positioned) -> None:
    place([cache], array([1, 3, 5]))
    with pytest.raises(ValueError, match="3 positions were placed for 2 tokens"):
        cache.update_and_fetch(tokens(2), tokens(2))


def test_placing_reaches_every_layer() -> None:
    caches = [PositionedKVCache(), CacheList(ArraysCache(2), PositionedRotatingKVCache(8)), ArraysCache(1)]
    place(caches, array([3, 8]))
    assert [part.offset.tolist() for part in leaves(caches) if isinstance(part, Positioned)] == [[[3, 8]]] * 2
    for part in leaves(caches):
        if isinstance(part, Positioned):
            part.update_and_fetch(tokens(2), tokens(2))
    assert (next_position(caches), shift_of(caches)) == (9, 7)


def test_recurrent_layers_alone_have_no_positions() -> None:
    assert (next_position([ArraysCache(2)]), shift_of([ArraysCache(2)])) == (0, 0)


# --- which caches can ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache",
    [ChunkedKVCache(8), QuantizedKVCache(), RotatingKVCache(8, keep=2), CacheList(KVCache(), ChunkedKVCache(8))],
)
def test_other_caches_are_refused(cache: Any) -> None:
    with pytest.raises(SparseUnsupportedError, match="can't hold original positions"):
        positioned._make_positioned(cache)


def test_the_kind_of_every_layer_is_kept() -> None:
    kinds = [type(part) for part in leaves(make_positioned_cache(build("gemma3_text")))]
    stock = [type(part) for part in make_prompt_cache(build("gemma3_text"))]
    twins = {KVCache: PositionedKVCache, RotatingKVCache: PositionedRotatingKVCache}
    assert kinds == [twins[kind] for kind in stock]


# --- trimming counts positions ---------------------------------------------------------------------------------------


@given(ascending.filter(bool), st.integers(0, 70))
def test_trim_goes_back_by_positions(positions: list[int], count: int) -> None:
    cache = PositionedKVCache()
    put(cache, positions)
    end = positions[-1] + 1
    assert cache.trim(count) == min(count, end)
    left = [p for p in positions if p < end - count]
    assert (cache.next, cache.slots) == (max(0, end - count), len(left))
    assert cache.held.positions.tolist() == left


def test_a_recall_goes_with_what_was_fed_before_it() -> None:
    cache = PositionedKVCache()
    for part in ([0, 1, 9], [3, 4], [10, 11, 14]):
        put(cache, part)
    assert cache.trim(5) == 5
    assert (cache.next, cache.held.positions.tolist()) == (10, [0, 1, 9, 3, 4])
    assert cache.trim(1) == 1
    assert (cache.next, cache.slots, cache.held.positions.tolist()) == (9, 2, [0, 1])


def test_mlx_lm_trims_it_like_any_cache() -> None:
    caches = [PositionedKVCache(), PositionedKVCache()]
    for cache in caches:
        put(cache, [0, 1, 2, 7, 8, 30])
    assert trim_prompt_cache(caches, 23) == 23
    assert [(cache.next, cache.slots) for cache in caches] == [(8, 4), (8, 4)]


def test_a_ring_trims_until_it_has_wrapped() -> None:
    cache = PositionedRotatingKVCache(8)
    put(cache, [0, 1, 5, 9])
    assert cache.is_trimmable()
    assert cache.trim(5) == 5
    assert (cache.next, cache.slots, cache.held.positions.tolist()) == (5, 2, [0, 1])
    put(cache, [5, 6, 7, 20, 21, 22, 23])
    assert not cache.is_trimmable()


# --- masks against sets ----------------------------------------------------------------------------------------------


def visible(mask: Any, keys: mx.array, count: int) -> list[list[int]]:
    """The positions that each of `count` rows sees; `keys` (1, 1, S, 1) hold positions."""
    stored = np.array(keys).reshape(-1).astype(int)
    if mask is None:
        shown = np.ones((count, stored.size), dtype=bool)
    elif isinstance(mask, str):
        shown = np.tri(count, stored.size, stored.size - count, dtype=bool)
    else:
        shown = np.broadcast_to(np.array(mask).reshape(-1, stored.size), (count, stored.size))
    return [sorted(stored[row].tolist()) for row in shown]


steps = st.lists(
    st.tuples(st.lists(st.integers(1, 12) | st.just(1) | st.just(1), min_size=1, max_size=11), st.booleans()),
    min_size=1,
    max_size=14,
)


def check_windows(cache: Any, fed: list[tuple[list[int], bool]], window: int, asked: int | None) -> None:
    """Feed chunks given by the gaps between their tokens; what every row sees is its window over all positions fed."""
    history: list[int] = []
    for gaps, placed in fed:
        if not placed:
            gaps = [1] * len(gaps)
        start = history[-1] if history else -1
        coming = [start + int(total) for total in np.cumsum(gaps)]
        if placed:
            place([cache], array(coming))
        mask = cache.make_mask(len(coming), window_size=asked, return_array=False)
        keys = mx.array(coming, dtype=mx.float32).reshape(1, 1, -1, 1)
        stored, _ = cache.update_and_fetch(keys, keys)
        history += coming
        assert visible(mask, stored, len(coming)) == [
            [p for p in history if p <= query and query - p < window] for query in coming
        ]
        assert cache.next == history[-1] + 1
        assert cache.slots == len(history)


@given(
    ascending.filter(bool),
    st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 99)), max_size=6),
    st.none() | st.integers(1, 30),
)
def test_recalled_tokens_and_what_follows_see_what_is_stored_by_then_at_lower_positions(
    first: list[int], parts: list[tuple[bool, int, int]], window: int | None
) -> None:
    """Texts and recalls in turn, in forwards of one token and of several."""
    cache, stored, coming = PositionedKVCache(), list[Any](), first
    for recalled, count, seed in [(False, 0, 0), *parts]:
        missing = sorted(set(range(cache.next)) - set(stored))
        if recalled and missing:
            coming = sorted(np.random.default_rng(seed).permutation(missing)[:count].tolist())
        elif count:
            coming = [cache.next + 2 * index for index in range(count)]
        place([cache], array(coming))
        mask = cache.make_mask(len(coming), window_size=window)
        keys = mx.array(coming, dtype=mx.float32).reshape(1, 1, -1, 1)
        fetched, _ = cache.update_and_fetch(keys, keys)
        stored += coming
        assert visible(mask, fetched, len(coming)) == [
            sorted(p for p in stored if p <= query and (window is None or query - p < window)) for query in coming
        ]


def test_without_a_window_what_follows_a_recall_is_masked_as_in_mlx_lm() -> None:
    cache = PositionedKVCache()
    put(cache, [0, 9])
    put(cache, [3])
    assert cache.make_mask(1) is None
    assert cache.make_mask(4) == "causal"
    place([cache], array([10, 30]))
    assert cache.make_mask(2) == "causal"


@given(steps, st.integers(2, 20))
def test_a_ring_shows_the_window_over_original_positions(fed: list[tuple[list[int], bool]], size: int) -> None:
    check_windows(PositionedRotatingKVCache(size), fed, size, None)


@given(steps, st.integers(2, 20), st.integers(1, 20))
def test_windows_narrower_than_the_ring(fed: list[tuple[list[int], bool]], size: int, window: int) -> None:
    window = min(size, window)
    check_windows(PositionedRotatingKVCache(size), fed, window, window)


@given(steps, st.integers(1, 30))
def test_windows_over_a_full_cache(fed: list[tuple[list[int], bool]], window: int) -> None:
    check_windows(PositionedKVCache(), fed, window, window)


@given(steps)
def test_full_attention_sees_all_that_was_fed(fed: list[tuple[list[int], bool]]) -> None:
    check_windows(PositionedKVCache(), fed, 10**6, None)


@pytest.mark.parametrize("size", [4, 9])
def test_decoding_long_after_the_wrap(size: int) -> None:
    prompt = [([1, 3, 2, 9, 1, 1, 4], True), ([1, 1, 30, 2], True)]
    check_windows(PositionedRotatingKVCache(size), prompt + [([1], False)] * 40, size, None)


def test_a_window_that_is_asked_wider_than_the_ring_is_the_ring_in_decode() -> None:
    """plamo3 asks for one more than its ring holds; a dense ring has already lost that token."""
    check_windows(PositionedRotatingKVCache(4), [([1, 7, 2, 1], True), *[([2], True), ([1], False)] * 5], 4, None)
    cache = PositionedRotatingKVCache(4)
    put(cache, [0, 7, 8, 9, 10])
    keys = mx.array([11.0, 8.0, 9.0, 10.0]).reshape(1, 1, -1, 1)
    assert visible(cache.make_mask(1, window_size=5), keys, 1) == [[8, 9, 10, 11]]
    put(cache, [12])
    keys = mx.array([12.0, 13.0, 9.0, 10.0]).reshape(1, 1, -1, 1)
    assert visible(cache.make_mask(1, window_size=5), keys, 1) == [[10, 12, 13]]


def test_gapless_masks_are_the_ones_of_mlx_lm() -> None:
    mine, stock = PositionedRotatingKVCache(8), RotatingKVCache(8)
    for count in (3, 1, 6, 1, 1):
        ours, theirs = mine.make_mask(count, window_size=8), stock.make_mask(count, window_size=8)
        assert type(ours) is type(theirs)
        if isinstance(ours, mx.array):
            assert mx.array_equal(ours, theirs)
        mine.update_and_fetch(tokens(count), tokens(count))
        stock.update_and_fetch(tokens(count), tokens(count))


# --- saving and copying ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama+window", "qwen3_5", "deepseek_v3", "falcon_h1"])
def test_a_cache_restored_from_its_state_goes_on_as_before(name: str) -> None:
    model, case = build(name), make_case(100, length=48, decoded=4)
    caches = make_positioned_cache(model)
    feed(model, caches, case.prompt[case.kept], case.continuation[:1], case.kept)
    copied = copy.deepcopy(caches)
    restored = [type(part).from_state(part.state) for part in copy.deepcopy(caches)]
    continuations = [
        feed(model, each, case.continuation[1:], case.continuation[:0]) for each in (caches, restored, copied)
    ]
    assert np.array_equal(continuations[0], continuations[1])
    assert np.array_equal(continuations[0], continuations[2])
    assert next_position(restored) == next_position(caches) == 48 + 4
    assert shift_of(restored) == shift_of(caches) == 48 - case.kept.size


def test_a_copy_is_independent() -> None:
    cache = PositionedKVCache()
    put(cache, [1, 4])
    other = copy.deepcopy(cache)
    put(other, [9])
    assert (cache.next, cache.slots) == (5, 2)
    assert cache.held.positions.tolist() == [1, 4]


# --- quantised caches can't carry the shift --------------------------------------------------------------------------


def test_a_quantized_cache_decodes_at_the_shift_that_it_is_given() -> None:
    model, case = build("qwen3_vl"), make_case(100, length=96, decoded=4)  # heads of 32, one quantisation group
    caches = make_positioned_cache(model)
    feed(model, caches, case.prompt[case.kept], case.continuation[:0], case.kept)
    exact = feed(model, copy.deepcopy(caches), case.continuation, case.continuation[:0], chunks=(1,))
    quantized, shift = quantize_kv(caches, 8)
    assert shift == 96 - case.kept.size

    def decode(shift: int) -> np.ndarray:
        with adjust_offsets([shift]):
            return feed(model, copy.deepcopy(quantized), case.continuation, case.continuation[:0], chunks=(1,))

    scale = np.abs(exact).max()
    assert np.abs(decode(shift) - exact).max() < 0.03 * scale
    assert np.abs(decode(0) - exact).max() > 0.05 * scale


def test_windows_and_composites_are_not_quantized() -> None:
    with pytest.raises(SparseUnsupportedError, match="PositionedRotatingKVCache can't be quantised"):
        quantize_kv([PositionedKVCache(), PositionedRotatingKVCache(8)], 8)
    with pytest.raises(SparseUnsupportedError, match="CacheList can't be quantised"):
        quantize_kv([CacheList(PositionedKVCache())], 8)


@pytest.mark.parametrize(("size", "group"), [(128, 64), (64, 64), (96, 32), (32, 32), (80, None), (16, None)])
def test_groups_fit_the_heads(size: int, group: int | None) -> None:
    cache = PositionedKVCache()
    cache.update_and_fetch(mx.ones((1, 2, 5, size)), mx.ones((1, 2, 5, size)))
    if group is None:
        with pytest.raises(SparseUnsupportedError, match=f"heads of {size} and {size} values"):
            quantize_kv([cache], 8)
    else:
        assert quantize_kv([cache], 8)[0][0].group_size == group


def test_recurrent_state_is_left_as_it_is() -> None:
    recurrent = ArraysCache(2)
    quantized, shift = quantize_kv([recurrent, PositionedKVCache()], 8)
    assert quantized[0] is recurrent
    assert isinstance(quantized[1], QuantizedKVCache)
    assert shift == 0
    assert cache_arrays([recurrent]) == []
