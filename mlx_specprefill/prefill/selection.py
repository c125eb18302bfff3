"""From importance to kept tokens (SpecPrefill, section 3.2.3). Pure array functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import SelectionConfig
from .text import PromptText

__all__ = [
    "Selection",
    "by_sentence",
    "chunk_means",
    "completed",
    "held_part",
    "kept_spans",
    "select_chunks",
    "select_tokens",
]

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int32]

_LOOKED = 13  # tokens of a line or sentence that it is weighed by: as many as attention is smoothed over
_STANDS_OUT = 12.0  # times the median chunk
_PIECE = 32  # tokens: what stands for a line or sentence where that is too long or not at hand


@dataclass(frozen=True, slots=True)
class Selection:
    """What the target will see.

    Attributes:
        kept: prompt indices of the kept tokens, ascending and unique, int32 (N,).
        chunk_scores: by which chunks were chosen, float32 (C,).
        asked: what a chunk is asked for itself and not as the rest of a line or sentence, float32 (C,).
        chunk_forced: chunks whose every token is forced (C,).
        chunk_chosen: chunks kept for their score (C,).
        chunk_size: tokens per chunk; the last one may be shorter.
    """

    kept: Indices
    chunk_scores: Floats
    asked: Floats
    chunk_forced: Bools
    chunk_chosen: Bools
    chunk_size: int


def chunk_means(importance: Floats, chunk_size: int) -> Floats:
    """Mean over contiguous chunks, (M,) -> (C,); a short last chunk is averaged over its own length."""
    starts = np.arange(0, importance.size, chunk_size)
    sums = np.add.reduceat(importance.astype(np.float64), starts)
    lengths = np.diff(np.append(starts, importance.size))
    return (sums / lengths).astype(np.float32)


def by_sentence(importance: Floats, chunk_scores: Floats, units: Indices, config: SelectionConfig) -> Floats:
    """Scores with which the chunks of one line or sentence are kept together, (C,) -> (C,), none lower than before.

    The draft looks at where a passage begins. What goes on in the next chunk, like the value after a long name, would
    compete with the best of the rest on its own. Every chunk that a line or sentence touches gets at least the mean of
    those 13 of its tokens in a row that were looked at most.

    Args:
        importance: (M,) of which `chunk_scores` are the means.
        units: where lines and sentences begin, ascending, the first at 0 (`PromptText`); those longer than
            `sentence_limit` are cut into pieces.
    """
    M, size, window = importance.size, config.chunk_size, max(_LOOKED, config.chunk_size)
    begin, end = _pieces(units, M, config.sentence_limit)
    total = np.append(0.0, np.cumsum(importance, dtype=np.float64))
    looked_end = np.minimum(np.arange(M) + window, np.repeat(end, end - begin))
    seen = total[looked_end] - total[:M]  # in what begins at each token and ends with its unit at the latest
    height = (np.maximum.reduceat(seen, begin) / window).astype(np.float32)
    first, parts = begin // size, (end - 1) // size - begin // size + 1
    unit = np.repeat(np.arange(parts.size), parts)
    chunk = first[unit] + np.arange(unit.size) - np.repeat(np.cumsum(parts) - parts, parts)
    scores = chunk_scores.copy()
    np.maximum.at(scores, chunk, height[unit])
    return scores


def _pieces(units: Indices, length: int, limit: int) -> tuple[Indices, Indices]:
    """Where units that are longer than `limit` tokens are cut as well, and where each ends."""
    ends = np.append(units[1:], length)
    long = ends - units > limit
    cuts = [np.arange(start, end, _PIECE) for start, end in zip(units[long], ends[long], strict=True)]
    starts = np.union1d(units, np.concatenate(cuts)) if cuts else units
    return starts, np.append(starts[1:], length)


def select_chunks(chunk_scores: Floats, forced: Bools, keep: Fraction, chunk_size: int) -> Selection:
    """Keep ceil(C * keep) chunks, best score first, ties to the lower index, plus every forced token.

    Chunks that are forced as a whole count towards the budget, but at least half of it goes to chunks chosen by score:
    a long system prompt must not leave nothing for the document. A chunk that is forced in part competes like any
    other; when it loses, its forced tokens are kept without the rest.

    Args:
        chunk_scores: (C,) finite.
        forced: (M,) per token, with ceil(M / chunk_size) == C.
        keep: share of chunks in [0, 1], exact: the ceiling of a float product is wrong for some shares.
    """
    M, C = forced.size, chunk_scores.size
    starts = np.arange(0, M, chunk_size)
    if starts.size != C:
        raise ValueError(f"{C} chunk scores for {starts.size} chunks")
    chunk_forced = np.logical_and.reduceat(forced, starts)
    budget = -((-C * keep.numerator) // keep.denominator)
    count = max(budget - int(chunk_forced.sum()), -(-budget // 2))
    ranked = np.argsort(np.where(chunk_forced, np.inf, -chunk_scores), kind="stable")
    chosen = np.zeros(C, dtype=np.bool_)
    chosen[ranked[: min(count, C - int(chunk_forced.sum()))]] = True
    tokens = np.repeat(chosen, chunk_size)[:M] | forced
    kept = np.flatnonzero(tokens).astype(np.int32)
    return Selection(kept, chunk_scores, chunk_scores, chunk_forced, chosen, chunk_size)


def select_tokens(
    importance: Floats, forced: Bools, text: PromptText, keep: Fraction, config: SelectionConfig
) -> Selection:
    """From importance (M,) to what is kept: chunk means, lines and sentences kept together, the best chunks.

    Args:
        forced: (M,) per token.
    """
    means = chunk_means(importance, config.chunk_size)
    if not config.by_sentence:
        return select_chunks(means, forced, keep, config.chunk_size)
    scores = by_sentence(importance, means, text.units, config)
    # Smoothing carries what was looked at over the end of a line. Nobody asks for what lies there.
    asked = np.minimum(means, by_sentence(importance, np.zeros_like(means), text.units, config))
    return replace(select_chunks(scores, forced, keep, config.chunk_size), asked=asked)


def held_part(selection: Selection, held: Bools) -> tuple[float, Indices]:
    """How much of what the selection asks for an earlier turn has kept already, and the rest.

    What it asks for are the chosen chunks that stand out: twelve times the score of an ordinary one. The others fill
    the budget and change from question to question. Chosen chunks beside one that stands out, up to 32 tokens away and
    with no gap, are missed with it but do not count: the rest of a line or sentence.

    Args:
        held: (L,) whether the earlier turn kept the token, for the first L <= M tokens; the rest is new to it.

    Returns:
        A share of importance between 0 and 1, and the tokens before L that are missing, ascending int32.
    """
    scores = selection.asked
    candidates = scores[~selection.chunk_forced]
    ordinary = float(np.median(candidates)) if candidates.size else 0.0
    stands_out = selection.chunk_chosen & (scores >= _STANDS_OUT * ordinary)
    importance = np.repeat(np.where(stands_out, scores, 0.0), selection.chunk_size)[: held.size]
    total = float(importance.sum())
    share = float(importance[held].sum()) / total if total > 0 else 1.0
    asked = stands_out.copy()
    for _ in range(max(1, _PIECE // selection.chunk_size)):
        before, after = asked[:-1].copy(), asked[1:].copy()
        asked[1:] |= selection.chunk_chosen[1:] & before
        asked[:-1] |= selection.chunk_chosen[:-1] & after
    lacking = np.repeat(asked, selection.chunk_size)[: held.size] & ~held
    return share, np.flatnonzero(lacking).astype(np.int32)


def completed(missing: Indices, selection: Selection, held: Bools, limit: int) -> Indices:
    """`missing` tokens, and of the other chosen chunks that are not held the best, while all together fit in `limit`.

    Args:
        held: as in `held_part`.
    """
    lacking = np.zeros(held.size, dtype=np.bool_)
    lacking[missing] = True
    size, left = selection.chunk_size, limit - missing.size
    best_first = np.argsort(-selection.chunk_scores, kind="stable")
    for chunk in best_first[selection.chunk_chosen[best_first]]:
        part = slice(chunk * size, min((chunk + 1) * size, held.size))
        more = ~held[part] & ~lacking[part]
        if more.sum() > left:
            break
        lacking[part] |= more
        left -= int(more.sum())
    return np.flatnonzero(lacking).astype(np.int32)


def kept_spans(kept: Indices) -> tuple[tuple[int, int], ...]:
    """Kept indices as maximal [start, end) spans."""
    parts = np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1)
    return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if part.size)
