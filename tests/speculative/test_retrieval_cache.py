"""Which chunks each KV head keeps, and what the small cache then holds, against plain loops."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_specprefill.speculative.triforce import RetrievalKVCache

HEADS, KV, D = 6, 2, 8


def arrays(seed: int, length: int) -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    shapes = ((HEADS, D), (1, KV, length, D), (1, KV, length, D))
    return tuple(mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes)


def filled(keys: mx.array, values: mx.array) -> KVCache:
    source = KVCache()
    source.update_and_fetch(keys, values)
    return source


def shares(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the largest share that a query of one KV head gives to each chunk; keys (C, chunk size, D)."""
    best = np.zeros(len(keys))
    for query in queries:
        weights = np.exp(keys @ query / np.sqrt(D))
        best = np.maximum(best, weights.sum(axis=-1) / weights.sum())
    return best


def best(scores: np.ndarray, count: int) -> list[int]:
    carried = np.array([max(score, 0.25 * before) for score, before in zip(scores, [0.0, *scores[:-1]], strict=True)])
    carried[0] = np.inf
    return sorted(np.argsort(-carried)[:count].tolist())


def brute_force(queries: np.ndarray, keys: np.ndarray, count: int) -> list[list[int]]:
    """Keys (KV, C, tokens of a chunk, D)."""
    chosen: list[list[int]] = []
    for head in range(KV if keys.shape[1] else 0):
        asking = queries[head * HEADS // KV : (head + 1) * HEADS // KV]
        scores = shares(asking, keys[head].mean(axis=1, keepdims=True))
        listed = best(scores, 4 * count)
        scores = np.zeros(keys.shape[1])
        scores[listed] = shares(asking, keys[head, listed])
        chosen.append(best(scores, count))
    return chosen


@pytest.mark.parametrize("length", [9, 64, 101, 250])
@pytest.mark.parametrize(("budget", "chunk"), [(16, 4), (48, 8), (40, 2)])
def test_chosen_chunks_and_ring(length: int, budget: int, chunk: int) -> None:
    queries, keys, values = arrays(length, length)
    small = RetrievalKVCache(filled(keys, values), budget, chunk)
    small.rebuild(queries)
    chunks = max(0, length - small.ring // 2) // chunk
    cut = np.array(keys[0, :, : chunks * chunk]).reshape(KV, chunks, chunk, D)
    expected = brute_force(np.array(queries), cut, min(small.chunks, chunks))
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


def test_a_full_ring_asks_for_new_chunks_and_means_are_kept() -> None:
    queries, keys, values = arrays(4, 200)
    source = filled(keys[..., :60, :], values[..., :60, :])
    small = RetrievalKVCache(source, 64, 4)
    small.rebuild(queries)
    for slot in range(60, 200):
        source.update_and_fetch(keys[..., slot : slot + 1, :], values[..., slot : slot + 1, :])
        if small.full:
            small.rebuild(queries)
        small.follow()
        assert small.size() <= 64 + 1
    fresh = RetrievalKVCache(source, 64, 4)
    fresh.rebuild(queries)
    small.rebuild(queries)
    np.testing.assert_array_equal(np.array(small.chosen), np.array(fresh.chosen))
