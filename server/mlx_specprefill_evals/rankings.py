"""Scores for prompt tokens that need no draft: what the draft's choice is compared with. Pure.

All return importance, float32 (M,), constant within a chunk or falling to the means that selection takes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from . import bm25

__all__ = ["by_recency", "by_words", "gold_first", "random_chunks"]

Floats = npt.NDArray[np.float32]


def random_chunks(length: int, chunk_size: int, seed: int) -> Floats:
    """Every chunk equally likely."""
    ranks = np.random.default_rng(seed).random(-(-length // chunk_size), dtype=np.float32)
    return np.repeat(ranks, chunk_size)[:length]


def by_recency(length: int) -> Floats:
    """The end of the prompt first; the first chunk is forced anyway (StreamingLLM's sinks and recent tokens)."""
    return np.arange(length, dtype=np.float32) / np.float32(length)


def by_words(length: int, passages: Sequence[str], size: int, query: str) -> Floats:
    """BM25 of each passage, `size` tokens long, for the words of the question."""
    scores = bm25.Index(bm25.words(passage) for passage in passages).scores(bm25.words(query))
    return np.repeat(scores, size)[:length]


def gold_first(length: int, chunk_size: int, gold: Sequence[tuple[int, int]], seed: int) -> Floats:
    """The chunks that hold gold passages, [start, end) each, then the others at random."""
    importance = random_chunks(length, chunk_size, seed)
    for start, end in gold:
        importance[start // chunk_size * chunk_size : -(-end // chunk_size) * chunk_size] += 1
    return importance
