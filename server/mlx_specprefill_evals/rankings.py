"""Scores for prompt tokens without a draft, as baselines for its selection. Pure.

All return importance, float32 (M,), constant within a chunk or falling to the means that selection takes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import bm25

Floats = npt.NDArray[np.float32]


def random_chunks(length: int, chunk_size: int, seed: int) -> Floats:
    """Score every chunk at random."""
    ranks = np.random.default_rng(seed).random(-(-length // chunk_size), dtype=np.float32)
    return np.repeat(ranks, chunk_size)[:length]


def by_recency(length: int) -> Floats:
    """Score the end of the prompt highest. The first chunk is forced anyway (StreamingLLM's sinks and recent text)."""
    return np.arange(length, dtype=np.float32) / np.float32(length)


def by_words(length: int, passages: Sequence[str], size: int, query: str) -> Floats:
    """Score each passage, `size` tokens long, by its BM25 for the words of the question."""
    scores = bm25.Index(bm25.words(passage) for passage in passages).scores(bm25.words(query))
    return np.repeat(scores, size)[:length]


def gold_first(length: int, chunk_size: int, gold: Sequence[tuple[int, int]], seed: int) -> Floats:
    """Score the chunks with gold passages, [start, end) each, highest, and the others at random."""
    importance = random_chunks(length, chunk_size, seed)
    for start, end in gold:
        importance[start // chunk_size * chunk_size : -(-end // chunk_size) * chunk_size] += 1
    return importance
