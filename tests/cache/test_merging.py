"""Caches of single rows, read side by side: each row sees, and holds, what it does alone."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, QuantizedKVCache, RotatingKVCache

from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.cache.merging import can_share, gather, scatter
from mlx_specprefill.cache.positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, place
from tests.support.precision import assert_close

HEADS, D, WINDOW = 2, 32, 6
KINDS = {
    "full": PositionedKVCache,
    "ring": lambda: PositionedRotatingKVCache(WINDOW),
    "quantised": lambda: QuantizedKVCache(32, 8),
    "four bits": lambda: QuantizedKVCache(32, 4),
}
MIXTURES = [["full"] * 3, ["ring"] * 3, ["quantised"] * 3, ["full", "quantised", "four bits"]]

pytestmark = pytest.mark.usefixtures("on_the_cpu")


def tokens(rows: int, count: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    keys, values = mx.random.normal((2, rows, HEADS, count, D)).astype(dtype)
    return keys, values


def filled(kind: str, positions: list[int], dtype: mx.Dtype) -> Any:
    cache = KINDS[kind]()
    if isinstance(cache, Positioned):
        place([cache], np.array(positions, dtype=np.int32))
    cache.update_and_fetch(*tokens(1, len(positions), dtype))
    return cache


def attended(cache: Any, queries: mx.array, keys: mx.array, values: mx.array, window: int | None) -> mx.array:
    mask = create_attention_mask(queries[:, 0], cache, window_size=window)
    fetched = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *fetched, cache=cache, scale=0.2, mask=mask)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kinds", MIXTURES, ids=str)
def test_each_row_reads_its_own_tokens(kinds: list[str], dtype: mx.Dtype) -> None:
    """Rows have other lengths, and gaps; a ring wraps; several query heads share a key's."""
    install_patches()
    places = [[0], [0, 1, 2, 7, 8], list(range(11))]
    alone = [filled(kind, place, dtype) for kind, place in zip(kinds, places, strict=True)]
    (batch,) = gather([[cache] for cache in copy.deepcopy(alone)])
    window = WINDOW if kinds[0] == "ring" else None
    for _ in range(2 * WINDOW):
        queries = mx.random.normal((3, 2 * HEADS, 1, D)).astype(dtype)
        keys, values = tokens(3, 1, dtype)
        if dtype == mx.float32 and "ring" not in kinds:
            assert np.array(batch.offset).tolist() == [cache.offset for cache in alone]
        got = attended(batch, queries, keys, values, window)
        assert got.dtype == dtype
        for row, cache in enumerate(alone):
            at = slice(row, row + 1)
            assert_close(
                got[at],
                attended(cache, queries[at], keys[at], values[at], window),
                1e-6 if dtype == mx.float32 else 1e-2,
            )


def test_recurrent_states_come_back_to_their_rows_and_keep_no_other_alive() -> None:
    rows = [[ArraysCache(2), PositionedKVCache()] for _ in range(3)]
    for number, (states, _) in enumerate(rows):
        states[0] = mx.full((1, 1 << 18), float(number))
    shared = gather(rows)
    shared[0][0] = shared[0][0] + 1
    scatter(shared, rows)
    del shared
    for number, (states, _) in enumerate(rows):
        assert states[1] is None
        assert mx.array_equal(states[0], mx.full((1, 1 << 18), number + 1.0))
    before = mx.get_active_memory()
    del states
    rows[1:] = []
    mx.eval(rows[0][0].state[0][0])
    assert before - mx.get_active_memory() >= 2 << 20


def test_models_may_tie_other_work_to_its_keys() -> None:
    """As those that run on several machines do."""
    (batch,) = gather([[filled("full", [0, 1], mx.float32)] for _ in range(2)])
    before = [np.array(cache.keys) for cache in batch.caches]
    batch.keys = mx.depends(batch.keys, mx.zeros(1))
    for cache, keys in zip(batch.caches, before, strict=True):
        np.testing.assert_array_equal(np.array(cache.keys), keys)


@pytest.mark.parametrize(
    ("cache", "shares"),
    [
        (PositionedKVCache(), True),
        (PositionedRotatingKVCache(WINDOW), True),
        (QuantizedKVCache(32, 8), True),
        (ArraysCache(2), True),
        (CacheList(ArraysCache(1), PositionedKVCache()), True),
        (RotatingKVCache(WINDOW, keep=2), False),
        (ChunkedKVCache(8), False),
        (CacheList(PositionedKVCache(), ChunkedKVCache(8)), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_caches_share_a_forward(cache: Any, shares: bool) -> None:
    assert can_share([cache]) == shares
