"""Which chunks each KV head keeps, and what the small cache then holds, against plain loops."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_specprefill.cache.retrieval import RetrievalKVCache, best_chunks

HEADS, KV, D = 6, 2, 8


def arrays(seed: int, length: int) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    shapes = ((HEADS, D), (1, KV, length, D), (1, KV, length, D))
    return tuple(mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes)  # type: ignore[return-value]


def filled(keys: mx.array, values: mx.array) -> KVCache:
    source = KVCache()
    source.update_and_fetch(keys, values)
    return source


def brute_force(
    queries: np.ndarray, keys: np.ndarray, chunks: int, chunk: int, grain: int, count: int
) -> list[list[int]]:
    chosen: list[list[int]] = []
    if chunks == 0:
        return chosen
    for head in range(KV):
        best = np.zeros(chunks)
        for query in queries[head * HEADS // KV : (head + 1) * HEADS // KV]:
            means = [keys[head, at : at + grain].mean(axis=0) for at in range(0, chunks * chunk, grain)]
            weights = np.exp(np.stack(means) @ query / np.sqrt(D))
            best = np.maximum(best, weights.reshape(chunks, -1).sum(axis=-1) / weights.sum())
        best = np.array([max(score, 0.25 * before) for score, before in zip(best, [0.0, *best[:-1]], strict=True)])
        best[0] = np.inf
        chosen.append(sorted(np.argsort(-best)[:count].tolist()))
    return chosen


@pytest.mark.parametrize("length", [9, 64, 101, 250])
@pytest.mark.parametrize(
    ("budget", "chunk", "grain"), [(16, 4, 1), (16, 4, 2), (16, 4, 4), (48, 8, 1), (40, 2, 1), (40, 2, 2)]
)
def test_chosen_chunks_and_ring(length: int, budget: int, chunk: int, grain: int) -> None:
    queries, keys, values = arrays(length, length)
    small = RetrievalKVCache(filled(keys, values), budget, chunk, grain)
    small.rebuild(queries)
    chunks = max(0, length - small.ring // 2) // chunk
    expected = brute_force(np.array(queries), np.array(keys[0]), chunks, chunk, grain, min(small.chunks, chunks))
    assert chunks == 0 or np.array(small.chosen).tolist() == expected
    ring = length - chunks * chunk
    assert small.ring // 2 <= ring < small.ring // 2 + chunk or length < small.ring // 2
    for head in range(KV):
        picked = [slot for c in (expected[head] if chunks else []) for slot in range(c * chunk, (c + 1) * chunk)]
        slots = [*picked, *range(length - ring, length)]
        assert len(slots) <= budget
        assert chunks == 0 or slots[:chunk] == list(range(chunk))  # the sink
        for ours, whole in ((small.keys, keys), (small.values, values)):
            np.testing.assert_array_equal(np.array(ours[0, head, : small.size()]), np.array(whole[0, head, slots]))


def test_room_for_everything_keeps_everything_in_order() -> None:
    queries, keys, values = arrays(0, 100)
    small = RetrievalKVCache(filled(keys, values), 400, 4)
    small.rebuild(queries)
    np.testing.assert_array_equal(np.array(small.keys[..., : small.size(), :]), np.array(keys))


def test_drafted_tokens_come_after_and_are_forgotten() -> None:
    queries, keys, values = arrays(3, 120)
    source = filled(keys[..., :100, :], values[..., :100, :])
    small = RetrievalKVCache(source, 32, 4)
    assert small.full
    small.rebuild(queries)
    before = small.size()
    fetched, _ = small.update_and_fetch(keys[..., :3, :], values[..., :3, :])
    assert (fetched.shape[2], small.offset) == (before + 3, 103)
    small.trim(2)
    assert (small.size(), small.offset) == (before + 1, 101)
    source.update_and_fetch(keys[..., 100:105, :], values[..., 100:105, :])
    small.follow()
    assert (small.size(), small.offset) == (before + 5, 105)
    np.testing.assert_array_equal(np.array(small.keys[..., before : before + 5, :]), np.array(keys[..., 100:105, :]))


@pytest.mark.parametrize("grain", [1, 2, 4])
def test_a_full_ring_asks_for_new_chunks_and_means_are_kept(grain: int) -> None:
    queries, keys, values = arrays(4, 200)
    source = filled(keys[..., :60, :], values[..., :60, :])
    small = RetrievalKVCache(source, 64, 4, grain)
    small.rebuild(queries)
    for slot in range(60, 200):
        source.update_and_fetch(keys[..., slot : slot + 1, :], values[..., slot : slot + 1, :])
        if small.full:
            small.rebuild(queries)
        small.follow()
        assert small.size() <= 64 + 1
    fresh = RetrievalKVCache(source, 64, 4, grain)
    fresh.rebuild(queries)
    small.rebuild(queries)
    np.testing.assert_array_equal(np.array(small.chosen), np.array(fresh.chosen))


def test_one_head_that_retrieves_is_not_outvoted() -> None:
    keys = np.zeros((1, 10, D), dtype=np.float32)
    keys[0, 7, 0] = 30.0
    keys[0, 3, 1] = 6.0
    queries = np.zeros((4, D), dtype=np.float32)
    queries[0, 0], queries[1:, 1] = 1.0, 1.0
    assert 7 in np.array(best_chunks(mx.array(queries), mx.array(keys), 1, 2)).tolist()[0]


def test_a_passage_goes_on_in_the_next_chunk() -> None:
    keys = np.zeros((1, 10, D), dtype=np.float32)
    keys[0, 4, 0] = 30.0
    queries = np.zeros((4, D), dtype=np.float32)
    queries[:, 0] = 1.0
    assert np.array(best_chunks(mx.array(queries), mx.array(keys), 1, 3)).tolist() == [[0, 4, 5]]


def test_one_key_among_others_is_found_where_its_mean_is_lost() -> None:
    """A key that is looked at, in a chunk whose other keys are not: their mean is below that of a dull chunk."""
    keys = np.zeros((1, 5, 4, D), dtype=np.float32)
    keys[0, 3, :, 0], keys[0, 3, 2, 0] = -9.0, 12.0
    queries = np.zeros((1, D), dtype=np.float32)
    queries[0, 0] = 1.0
    flat = mx.array(keys.reshape(1, -1, D))
    assert 3 in np.array(best_chunks(mx.array(queries), flat, 4, 2)).tolist()[0]
    assert 3 not in np.array(best_chunks(mx.array(queries), mx.array(keys.mean(axis=2)), 1, 2)).tolist()[0]
