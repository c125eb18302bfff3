"""Selects the kept tokens by importance (SpecPrefill, section 3.2.3), and what a later turn recalls.

Pure array functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from ..arrays import Bools, Floats, Indices
from ..config import RuleName, SelectionConfig
from .text import PromptText

_LOOKED = 13  # best tokens that weigh a line or sentence: the width of the smoothing of attention
_ORDINARY = 0.99  # quantile of unchosen tokens; the maximum may be an outlier
_LEAST_RECALL = 256  # tokens that may always be recalled
PIECE = 32  # tokens: replaces a line or sentence that is too long or unknown


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens that the target will see.

    Attributes:
        kept: prompt indices of the kept tokens, ascending and unique, int32 (N,).
        forced: tokens kept at any score, bool (M,).
        token_scores: importance of each token, without smoothing across the end of a line, float32 (M,).
        chunk_scores: scores of the chunks, float32 (C,).
        chunk_forced: chunks with forced tokens only (C,).
        chunk_chosen: chunks kept for their score (C,).
        chunk_size: tokens per chunk; the last one may be shorter.
    """

    kept: Indices
    forced: Bools
    token_scores: Floats
    chunk_scores: Floats
    chunk_forced: Bools
    chunk_chosen: Bools
    chunk_size: int


def selection_by(rule: RuleName, config: SelectionConfig) -> SelectionConfig:
    """Return the rule's configuration: "paper" has the published chunks, with the same tokens forced."""
    return replace(config, chunk_size=32, by_sentence=False) if rule == "paper" else config


def chunk_means(importance: Floats, chunk_size: int) -> Floats:
    """Return the mean over contiguous chunks, (M,) -> (C,). A short last chunk is averaged over its own length."""
    starts = np.arange(0, importance.size, chunk_size)
    sums = np.add.reduceat(importance.astype(np.float64), starts)
    lengths = np.diff(np.append(starts, importance.size))
    return (sums / lengths).astype(np.float32)


def by_sentence(importance: Floats, units: Indices, config: SelectionConfig) -> Floats:
    """Return the weight of each token's line or sentence, (M,) float32: the mean of its best 13 tokens in a row.

    The draft attends to the start of a passage. Its continuation in the next chunk, like the value after a long name,
    would compete alone. Every chunk that a line or sentence touches gets at least its weight.

    Args:
        importance: (M,).
        units: starts of lines and sentences, ascending, the first at 0 (`PromptText`). Units longer than
            `sentence_limit` are cut into pieces.
    """
    M = importance.size
    begin, end = pieces(units, M, config.sentence_limit)
    total = np.append(0.0, np.cumsum(importance, dtype=np.float64))
    looked_end = np.minimum(np.arange(M) + _LOOKED, np.repeat(end, end - begin))
    seen = total[looked_end] - total[:M]  # tokens from each token on, up to the end of its unit
    weight = (np.maximum.reduceat(seen, begin) / _LOOKED).astype(np.float32)
    return np.repeat(weight, end - begin)


def pieces(units: Indices, length: int, limit: int) -> tuple[Indices, Indices]:
    """Return the starts and ends of units, those longer than `limit` tokens cut into pieces."""
    ends = np.append(units[1:], length)
    long = ends - units > limit
    cuts = [np.arange(start, end, PIECE) for start, end in zip(units[long], ends[long], strict=True)]
    starts = np.union1d(units, np.concatenate(cuts)) if cuts else units
    return starts, np.append(starts[1:], length)


def select_chunks(
    chunk_scores: Floats, forced: Bools, keep: Fraction, chunk_size: int, token_scores: Floats | None = None
) -> Selection:
    """Keep ceil(C * keep) chunks, best score first, ties to the lower index, plus every forced token.

    Fully forced chunks count towards the budget, but at least half of it goes to chunks chosen by score: a long system
    prompt must not displace the document. A partly forced chunk competes like any other; if it loses, only its forced
    tokens are kept.

    Args:
        chunk_scores: (C,) finite.
        forced: (M,) per token, with ceil(M / chunk_size) == C.
        keep: share of chunks in [0, 1], exact: the ceiling of a float product is wrong for some shares.
        token_scores: as in `Selection`; None: the score of the token's chunk.
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
    token_scores = np.repeat(chunk_scores, chunk_size)[:M] if token_scores is None else token_scores
    return Selection(kept, forced, token_scores, chunk_scores, chunk_forced, chosen, chunk_size)


def select_tokens(
    importance: Floats, forced: Bools, text: PromptText, keep: Fraction, config: SelectionConfig
) -> Selection:
    """Select from importance (M,): chunk means, lines and sentences kept together, the best chunks.

    Args:
        forced: (M,) per token.
    """
    scores, token_scores = chunk_means(importance, config.chunk_size), importance
    if config.by_sentence:
        weights = by_sentence(importance, text.units, config)
        scores = np.maximum(scores, np.maximum.reduceat(weights, np.arange(0, importance.size, config.chunk_size)))
        token_scores = np.minimum(importance, weights)
        _raise_headings(scores, text.headings, config.chunk_size)
    return select_chunks(scores, forced, keep, config.chunk_size, token_scores)


def select_part(
    importance: Floats,
    forced: Bools,
    text: PromptText,
    keep: Fraction,
    config: SelectionConfig,
    start: int = 0,
    end: int | None = None,
) -> Selection:
    """Select tokens from `start` (a chunk's start) to `end`. The result's `kept` counts from `start`."""
    importance = importance[start:end]
    part = text.part(start, start + importance.size)
    return select_tokens(importance, forced[start : start + importance.size], part, keep, config)


def _raise_headings(scores: Floats, headings: Indices, size: int) -> None:
    """Raise a heading to the best score of its lines, which mean little without it.

    Args:
        scores: (C,) of chunks; raises those of headings in place.
        headings: of `PromptText`.
        size: of a chunk.
    """
    if not headings.size:
        return
    below = np.stack([headings[:, 1] // size, -(-headings[:, 2] // size)], axis=1)
    best, raised = np.maximum.reduceat(np.append(scores, 0), below.ravel())[::2], scores.tolist()
    for (start, end, _), score in zip(headings.tolist(), best.tolist(), strict=True):
        chunks, least = slice(start // size, -(-end // size)), max(score, raised[end // size])  # raised before, maybe
        raised[chunks] = [max(one, least) for one in raised[chunks]]
    scores[:] = raised


def select_recalled(selection: Selection, held: Indices, stands_out: float, share: Fraction) -> Indices:
    """Return the tokens to recall, ascending: of those that `missing_of` returns the strongest.

    Args:
        held: indices of the tokens that the earlier turn kept.
        share: of the tokens that are chosen, recalled at most.
    """
    is_held = np.zeros(selection.forced.size, dtype=np.bool_)
    is_held[held[held < is_held.size]] = True
    most = max(_LEAST_RECALL, int(share * selection.kept.size))
    return strongest(missing_of(selection, is_held, stands_out), selection.token_scores, most)


def missing_of(selection: Selection, held: Bools, stands_out: float) -> Indices:
    """Return the chosen tokens that an earlier turn dropped and that stand out.

    Ordinary text fills most of the budget, and changes from question to question. So only tokens that stand out are
    recalled: their importance is a multiple of the best unchosen one. Tokens that the earlier turn holds do
    not count: an earlier question in the same words gets the most attention. The chosen chunks beside them are recalled
    too, up to 32 tokens away and without a gap: the rest of a line or sentence.

    Args:
        held: (L,) true if the earlier turn kept the token, for the first L <= M tokens; the rest is new.
        stands_out: of `SelectionConfig`.

    Returns:
        Tokens before L that are not held, ascending int32.
    """
    L, size = held.size, selection.chunk_size
    if held.all():
        return np.zeros(0, dtype=np.int32)
    token_scores, forced = selection.token_scores[:L], selection.forced[:L]
    chosen = np.repeat(selection.chunk_chosen, size)[:L]
    others = token_scores[~chosen & ~forced]
    ordinary = float(np.quantile(others, _ORDINARY)) if others.size else 0.0
    standing = chosen & ~forced & ~held & (token_scores > 0) & (token_scores >= stands_out * ordinary)
    starts = np.arange(0, L, size)
    near = np.logical_or.reduceat(standing, starts)
    whole = np.logical_and.reduceat(chosen, starts)
    for _ in range(max(1, PIECE // size)):
        before, after = near[:-1].copy(), near[1:].copy()
        near[1:] |= whole[1:] & before
        near[:-1] |= whole[:-1] & after
    return np.flatnonzero(np.repeat(near, size)[:L] & chosen & ~held).astype(np.int32)


def strongest(tokens: Indices, token_scores: Floats, most: int) -> Indices:
    """Return the runs of tokens with the highest importance, at most `most` tokens.

    Args:
        tokens: prompt indices, ascending int32.
        token_scores: importance (M,).
    """
    runs = sorted(_runs(tokens), key=lambda run: -float(token_scores[run].max()))
    return np.sort(np.concatenate([tokens[:0], *runs])[:most])


def kept_spans(kept: Indices) -> tuple[tuple[int, int], ...]:
    """Return kept indices as maximal [start, end) spans."""
    return tuple((int(run[0]), int(run[-1]) + 1) for run in _runs(kept))


def _runs(indices: Indices) -> list[Indices]:
    """Return ascending indices as maximal runs without a gap."""
    return [run for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if run.size]


def next_ranked(importance: Floats, reading: Indices, start: int) -> Bools:
    """Return the tokens behind `start` that rank next to those that are read there, and are as many, bool (M,)."""
    rest = np.setdiff1d(np.arange(start, importance.size, dtype=np.int32), reading)
    count = np.count_nonzero(reading >= start)
    marked = np.zeros(importance.size, dtype=np.bool_)
    marked[rest[np.argsort(-importance[rest], kind="stable")[:count]]] = True
    return marked
