"""Selects the kept tokens by importance (SpecPrefill, section 3.2.3). Pure array functions."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import RuleName, SelectionConfig
from ..request import TokenIds

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int32]

_LOOKED = 13  # best tokens that weigh a line or sentence: the width of the smoothing of attention
_ORDINARY = 0.99  # quantile of unchosen tokens; the maximum may be an outlier
_PIECE = 32  # tokens: replaces a line or sentence that is too long or unknown


@dataclass(frozen=True, slots=True)
class Selection:
    """The tokens that the target will see.

    Attributes:
        kept: prompt indices of the kept tokens, ascending and unique, int32 (N,).
        forced: tokens kept at any score, bool (M,).
        asked: importance of each token, without smoothing across the end of a line, float32 (M,).
        chunk_scores: scores of the chunks, float32 (C,).
        chunk_forced: chunks with forced tokens only (C,).
        chunk_chosen: chunks kept for their score (C,).
        chunk_size: tokens per chunk; the last one may be shorter.
    """

    kept: Indices
    forced: Bools
    asked: Floats
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
    begin, end = _pieces(units, M, config.sentence_limit)
    total = np.append(0.0, np.cumsum(importance, dtype=np.float64))
    looked_end = np.minimum(np.arange(M) + _LOOKED, np.repeat(end, end - begin))
    seen = total[looked_end] - total[:M]  # tokens from each token on, up to the end of its unit
    weight = (np.maximum.reduceat(seen, begin) / _LOOKED).astype(np.float32)
    return np.repeat(weight, end - begin)


def _pieces(units: Indices, length: int, limit: int) -> tuple[Indices, Indices]:
    """Return the starts and ends of units, those longer than `limit` tokens cut into pieces."""
    ends = np.append(units[1:], length)
    long = ends - units > limit
    cuts = [np.arange(start, end, _PIECE) for start, end in zip(units[long], ends[long], strict=True)]
    starts = np.union1d(units, np.concatenate(cuts)) if cuts else units
    return starts, np.append(starts[1:], length)


def select_chunks(
    chunk_scores: Floats, forced: Bools, keep: Fraction, chunk_size: int, asked: Floats | None = None
) -> Selection:
    """Keep ceil(C * keep) chunks, best score first, ties to the lower index, plus every forced token.

    Fully forced chunks count towards the budget, but at least half of it goes to chunks chosen by score: a long system
    prompt must not displace the document. A partly forced chunk competes like any other; if it loses, only its forced
    tokens are kept.

    Args:
        chunk_scores: (C,) finite.
        forced: (M,) per token, with ceil(M / chunk_size) == C.
        keep: share of chunks in [0, 1], exact: the ceiling of a float product is wrong for some shares.
        asked: as in `Selection`; None: the score of the token's chunk.
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
    asked = np.repeat(chunk_scores, chunk_size)[:M] if asked is None else asked
    return Selection(kept, forced, asked, chunk_scores, chunk_forced, chosen, chunk_size)


def select_tokens(
    importance: Floats, forced: Bools, text: PromptText, keep: Fraction, config: SelectionConfig
) -> Selection:
    """Select from importance (M,): chunk means, lines and sentences kept together, the best chunks.

    Args:
        forced: (M,) per token.
    """
    scores, asked = chunk_means(importance, config.chunk_size), importance
    if config.by_sentence:
        weights = by_sentence(importance, text.units, config)
        scores = np.maximum(scores, np.maximum.reduceat(weights, np.arange(0, importance.size, config.chunk_size)))
        asked = np.minimum(importance, weights)
        _raise_headings(scores, text.headings, config.chunk_size)
    return select_chunks(scores, forced, keep, config.chunk_size, asked)


def _raise_headings(scores: Floats, headings: Indices, size: int) -> None:
    """Raise a heading to the best score of its lines, which mean little without it.

    Args:
        scores: (C,) of chunks; raises those of headings in place.
        headings: of `PromptText`.
        size: of a chunk.
    """
    for start, end, last in headings.tolist():
        heading, below = scores[start // size : -(-end // size)], scores[end // size : -(-last // size)]
        np.maximum(heading, below.max(), out=heading)


def missing_of(selection: Selection, held: Bools, stands_out: float) -> Indices:
    """Return the chosen tokens that an earlier turn dropped and that stand out.

    Most of the budget is filled with ordinary text, which changes from question to question. Tokens are recalled only
    if they stand out: if their importance is a multiple of the best unchosen one. Tokens that the earlier turn holds do
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
    asked, forced = selection.asked[:L], selection.forced[:L]
    chosen = np.repeat(selection.chunk_chosen, size)[:L]
    others = asked[~chosen & ~forced]
    ordinary = float(np.quantile(others, _ORDINARY)) if others.size else 0.0
    standing = chosen & ~forced & ~held & (asked > 0) & (asked >= stands_out * ordinary)
    starts = np.arange(0, L, size)
    near = np.logical_or.reduceat(standing, starts)
    whole = np.logical_and.reduceat(chosen, starts)
    for _ in range(max(1, _PIECE // size)):
        before, after = near[:-1].copy(), near[1:].copy()
        near[1:] |= whole[1:] & before
        near[:-1] |= whole[:-1] & after
    return np.flatnonzero(np.repeat(near, size)[:L] & chosen & ~held).astype(np.int32)


def strongest(tokens: Indices, asked: Floats, most: int) -> Indices:
    """Return the runs of tokens with the highest importance, at most `most` tokens.

    Args:
        tokens: prompt indices, ascending int32.
        asked: importance (M,).
    """
    runs = sorted(_runs(tokens), key=lambda run: -float(asked[run].max()))
    return np.sort(np.concatenate([tokens[:0], *runs])[:most])


def kept_spans(kept: Indices) -> tuple[tuple[int, int], ...]:
    """Return kept indices as maximal [start, end) spans."""
    return tuple((int(run[0]), int(run[-1]) + 1) for run in _runs(kept))


def _runs(indices: Indices) -> list[Indices]:
    """Return ascending indices as maximal runs without a gap."""
    return [run for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1) if run.size]


_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
_BLANK = 16  # white space only
_DIGIT = 32  # the first visible character is a digit
_ENDS_NUMBER = 64  # of a line: a tab, colon, bar or dash behind it, or a sign beyond ASCII such as an arrow
_ASKS = 128  # has a question mark
_HEADING = 32  # longest heading, in tokens
_SPACES = ("\u0120", "\u2581")  # the space in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")
_QUESTION_MARKS = frozenset("?？؟")


@dataclass(frozen=True, slots=True)
class PromptText:
    """Lines, sentences and headings of a prompt.

    Attributes:
        units: starts of lines and sentences, ascending, the first of them 0; int32 (U,).
        headings: short lines above lines that belong to them: further indented, as below a function's first line, or
            with numbers in front, as below a file's name in search results. The indentation of numbered lines counts
            behind the number. Start and end of each heading, and the end of its lines; int32 (H, 3).
        marks: tokens with a question mark, ascending; int32 (Q,).
    """

    units: Indices
    headings: Indices = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))
    marks: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def part(self, start: int, end: int) -> PromptText:
        """Return the same for the prompt's tokens [start, end). Indices count from `start`."""
        inside = self.units[(self.units > start) & (self.units < end)]
        headings = self.headings[(self.headings[:, 0] >= start) & (self.headings[:, 1] < end)]
        marks = self.marks[(self.marks >= start) & (self.marks < end)] - np.int32(start)
        units = np.append(np.int32(0), inside - np.int32(start))
        return PromptText(units, np.minimum(headings, end) - np.int32(start), marks)


class TextReader:
    """Finds lines, sentences and headings with a tokenizer of mlx-lm. Decodes each token id once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space. Usable from any
    thread.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._learning = threading.Lock()
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint8)
        self._indents = np.zeros(0, dtype=np.uint8)  # blanks before the first character, behind a line break

    def read(self, tokens: TokenIds) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int32)
        with self._learning:
            self._learn(ids)
            kinds, indents = self._kinds[ids], self._indents[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units, _headings(kinds, indents), np.flatnonzero(kinds & _ASKS > 0).astype(np.int32))

    def _learn(self, ids: TokenIds) -> None:
        if ids.size and ids.max() >= self._kinds.size:
            missing = int(ids.max()) + 1 - self._kinds.size
            self._kinds = np.pad(self._kinds, (0, missing), constant_values=_UNKNOWN)
            self._indents = np.pad(self._indents, (0, missing))
        unknown = [int(token) for token in np.unique(ids[self._kinds[ids] == _UNKNOWN])]
        if unknown:
            pieces = self._tokenizer.convert_ids_to_tokens(unknown)
            for token, piece in zip(unknown, pieces, strict=True):
                self._kinds[token], self._indents[token] = self._kind_of(token, piece)

    def _kind_of(self, token: int, piece: Any) -> tuple[int, int]:
        spaced = isinstance(piece, str) and piece.startswith(_SPACES)
        word = piece[spaced:] if isinstance(piece, str) else ""
        if word.isascii() and word.isalnum():  # most of a vocabulary: decoding takes ten times as long
            return spaced * _BEGINS_WORD | word[0].isdigit() * _DIGIT, int(spaced)
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            text = " " + text
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        ends_sentence = text.rstrip(" ").endswith(_STOPS)
        ends_number = text.startswith(("\t", ":", "|", "-")) or not (text[:1].isascii() or text[:1].isalnum())
        kind = ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | ends_number * _ENDS_NUMBER
        kind |= text[:1].isspace() * _BEGINS_WORD | (not _QUESTION_MARKS.isdisjoint(text)) * _ASKS
        seen = text.lstrip()
        blanks = text[: len(text) - len(seen)].rpartition("\n")[2]
        return kind | (seen[:1].isdigit() * _DIGIT if seen else _BLANK), min(len(blanks), 255)


def _headings(kinds: npt.NDArray[np.uint8], indents: npt.NDArray[np.uint8]) -> Indices:
    """Return `PromptText.headings`. Skips lines without visible characters, or with a line number only."""
    M = kinds.size
    kinds, indents = (np.append(array, np.uint8(0)) for array in (kinds, indents))  # the end of the text
    starts = np.append(0, np.flatnonzero(kinds[: M - 1] & _ENDS_LINE > 0) + 1).astype(np.int32)
    ends = np.append(starts[1:], M).astype(np.int32)
    visible = _next(kinds & _BLANK == 0)
    no_digit, no_end = (_next((kinds & kind == 0) | (indents > 0)) for kind in (_DIGIT, _ENDS_NUMBER))
    first = visible[starts]
    behind = no_digit[np.minimum(first + 1, M)]
    numbered = (kinds[first] & _DIGIT > 0) & (kinds[behind] & _ENDS_NUMBER > 0)
    begin = np.where(numbered, no_end[behind], starts)  # of the text behind a number
    seen = visible[begin]
    shown = seen < ends
    starts, ends, begin, seen, first = starts[shown], ends[shown], begin[shown], seen[shown], first[shown]
    blanks = np.append(0, np.cumsum(indents, dtype=np.int64))
    broken = np.append(0, np.where(kinds & _BLANK > 0, indents, 0))  # a break's token may have the next blanks
    level = 2 * (blanks[seen + 1] - blanks[begin] + broken[begin]) + (kinds[first] & _DIGIT > 0)
    heads = np.flatnonzero(level[:-1] < level[1:])
    heads = heads[ends[heads] - starts[heads] <= _HEADING]
    return np.stack([starts[heads], ends[heads], ends[_last_below(level)[heads]]], axis=1).astype(np.int32)


def _next(wanted: Bools) -> npt.NDArray[np.int64]:
    """Return for each index the first wanted index from there on, (N,) -> (N,). The last one is wanted."""
    found = np.where(wanted, np.arange(wanted.size), wanted.size)
    return np.minimum.accumulate(found[::-1])[::-1]


def _last_below(level: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each line the last one in a row behind it with a higher level, or itself; (L,) -> (L,)."""
    last, open_lines = np.full(level.size, level.size - 1), list[int]()
    for line, here in enumerate(level.tolist()):
        while open_lines and level[open_lines[-1]] >= here:
            last[open_lines.pop()] = line - 1
        open_lines.append(line)
    return last
