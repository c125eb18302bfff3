"""From importance to kept tokens (SpecPrefill, section 3.2.3). Pure array functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..config import SelectionConfig
from .text import PromptText

__all__ = [
    "Selection",
    "chunk_means",
    "completed",
    "held_part",
    "held_together",
    "kept_spans",
    "lent",
    "select_chunks",
    "select_tokens",
]

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int32]

_LOOKED = 13  # tokens of a line or sentence that it is weighed by: as many as attention is smoothed over
_FADED = 8  # tokens from there after which what holds it together has faded once
_STANDS_OUT = 12.0  # times the median chunk
_PIECE = 32  # tokens, the paper's chunk: what stands for a line or sentence where that is too long or not at hand


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


def lent(importance: Floats, text: PromptText, config: SelectionConfig) -> Floats:
    """What lines and sentences that share a rare word lend each other, (M,) -> (C,) per chunk.

    The draft's few queries see where an answer begins. What that leads to, as "Anna works at Brook" to "Brook is in
    Exeter", they don't ask for yet, but the word leads there too. Where it stands gets `link_share` of the most that
    was looked at in it anywhere, over the root of the number of other places, and chunks less the further away they
    lie.

    Args:
        importance: (M,) of what lends.
    """
    start, end, word = text.rare.T
    total = np.append(0.0, np.cumsum(importance, dtype=np.float64))
    others = np.bincount(word)[word] - 1
    most = np.zeros(int(word.max(initial=0)) + 1)
    np.maximum.at(most, word, (total[end] - total[start]) / (end - start))
    begin, stop = _pieces(text.units, importance.size, config.unit_limit)
    unit = np.searchsorted(begin, start, side="right") - 1
    lends = np.divide(config.link_share * most[word], np.sqrt(others), out=np.zeros(word.size), where=others > 0)
    nothing = np.zeros(-(-importance.size // config.chunk_size), dtype=np.float32)
    return _raised(nothing, _Around(begin[unit], stop[unit], start, end), lends, config)


def held_together(importance: Floats, chunk_scores: Floats, units: Indices, config: SelectionConfig) -> Floats:
    """Scores with which the chunks of one line or sentence are kept together, (C,) -> (C,), none lower than before.

    The draft looks at where a passage begins. What goes on in the next chunk, like the value after a long name, would
    compete with the best of the rest on its own. Of the mean of those 13 tokens of a unit that were looked at most,
    wherever they lie, the chunks that hold part of them or are next to them get `unit_share`, and others less the
    further away they lie: where several long lines compete, the parts of all that were looked at come before the ends
    of one.

    Args:
        importance: (M,) of which `chunk_scores` are the means.
        units: where lines and sentences begin, ascending, the first at 0 (`PromptText`); those longer than `unit_limit`
            are cut into pieces.
    """
    M, window = importance.size, max(_LOOKED, config.chunk_size)
    begin, end = _pieces(units, M, config.unit_limit)
    total = np.append(0.0, np.cumsum(importance, dtype=np.float64))
    looked_end = np.minimum(np.arange(M, dtype=np.int32) + np.int32(window), np.repeat(end, end - begin))
    seen = total[looked_end] - total[:M]  # in what begins at each token and ends with its unit at the latest
    best = np.maximum.reduceat(seen, begin)
    at = np.flatnonzero(seen == np.repeat(best, end - begin))
    start = at[np.searchsorted(at, begin)].astype(np.int32)
    around = _Around(begin, end, start, looked_end[start])
    return _raised(chunk_scores, around, config.unit_share * best / window, config)


class _Around(NamedTuple):
    """Units, or pieces of them, and the places in them where something was found; prompt indices, each (N,)."""

    begin: Indices
    end: Indices
    start: Indices
    stop: Indices


def _raised(chunk_scores: Floats, around: _Around, height: npt.NDArray[np.float64], config: SelectionConfig) -> Floats:
    """Chunks of each unit get its height at least, times `unit_fade` per eight tokens between them and the place."""
    size = config.chunk_size
    first, parts = around.begin // size, (around.end - 1) // size - around.begin // size + 1
    unit = np.repeat(np.arange(parts.size), parts)
    chunk = first[unit] + np.arange(unit.size) - np.repeat(np.cumsum(parts) - parts, parts)
    away = np.maximum(np.maximum(chunk * size - around.stop[unit], around.start[unit] - (chunk + 1) * size), 0)
    scores = chunk_scores.copy()
    np.maximum.at(scores, chunk, (height[unit] * config.unit_fade ** (away / _FADED)).astype(np.float32))
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
    """From importance (M,) to what is kept: chunk means, linked lines, lines held together, the best chunks.

    Args:
        forced: (M,) per token.
    """
    found = np.where(forced, np.float32(0), importance)  # the question's tokens look at those just before it as well
    means = chunk_means(importance, config.chunk_size)
    links = lent(found, text, config)
    scores = held_together(importance, np.maximum(means, links), text.units, config)
    # Smoothing carries what was looked at over the end of a line. Nobody asks for what lies there.
    unfaded = replace(config, unit_share=1.0, unit_fade=1.0)
    lines = held_together(importance, np.zeros_like(means), text.units, unfaded)
    asked = np.maximum(np.minimum(means, lines), links)
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
