"""Scores for prompt tokens that need no draft: what the draft's choice is compared with. Pure.

All return importance, float32 (M,), constant within a chunk or falling to the means that selection takes anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["by_overlap", "by_recency", "gold_first", "random_chunks"]

Floats = npt.NDArray[np.float32]
BM25_K, BM25_B = 1.2, 0.75


def random_chunks(length: int, chunk_size: int, seed: int) -> Floats:
    """Every chunk equally likely."""
    ranks = np.random.default_rng(seed).random(-(-length // chunk_size), dtype=np.float32)
    return np.repeat(ranks, chunk_size)[:length]


def by_recency(length: int) -> Floats:
    """The end of the prompt first; the first chunk is forced anyway (StreamingLLM's sinks and recent tokens)."""
    return np.arange(length, dtype=np.float32) / np.float32(length)


def by_overlap(prompt: Sequence[int], chunk_size: int, query: Sequence[int]) -> Floats:
    """BM25 of each chunk, as a bag of tokens, for the tokens of the question."""
    M = len(prompt)
    chunks = [Counter(prompt[start : start + chunk_size]) for start in range(0, M, chunk_size)]
    frequency = Counter(token for chunk in chunks for token in chunk)
    C = len(chunks)
    mean_length = M / C
    scores = np.zeros(C, dtype=np.float32)
    for token in set(query):
        if not frequency[token]:
            continue
        rarity = np.log(1 + (C - frequency[token] + 0.5) / (frequency[token] + 0.5))
        for index, chunk in enumerate(chunks):
            if times := chunk[token]:
                length = BM25_K * (1 - BM25_B + BM25_B * chunk.total() / mean_length)
                scores[index] += rarity * times * (BM25_K + 1) / (times + length)
    return np.repeat(scores, chunk_size)[:M]


def gold_first(length: int, chunk_size: int, gold: Sequence[tuple[int, int]], seed: int) -> Floats:
    """The chunks that hold gold passages, [start, end) each, then the others at random."""
    importance = random_chunks(length, chunk_size, seed)
    for start, end in gold:
        importance[start // chunk_size * chunk_size : -(-end // chunk_size) * chunk_size] += 1
    return importance
