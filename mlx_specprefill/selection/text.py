"""Reads the lines, sentences and headings of a prompt from its tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Bools, Indices
from ..request import TokenIds

_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
_BLANK = 16  # white space only
_DIGIT = 32  # the first visible character is a digit
_ENDS_NUMBER = 64  # of a line: a tab, colon, bar or dash behind it, or a sign beyond ASCII such as an arrow
_HEADING = 32  # longest heading, in tokens
_SPACES = ("\u0120", "\u2581")  # the space in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")


@dataclass(frozen=True, slots=True)
class PromptText:
    """Lines, sentences and headings of a prompt.

    Attributes:
        units: starts of lines and sentences, ascending, the first of them 0; int32 (U,).
        headings: short lines above lines that belong to them: further indented, as below a function's first line, or
            with numbers in front, as below a file's name in search results. The indentation of numbered lines counts
            behind the number. Start and end of each heading, and the end of its lines; int32 (H, 3).
        pieces: the text of each token; of a whole prompt only.
    """

    units: Indices
    headings: Indices = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))
    pieces: Sequence[str] = ()

    def part(self, start: int, end: int) -> PromptText:
        """Return the same for the prompt's tokens [start, end), without pieces. Indices count from `start`."""
        inside = self.units[(self.units > start) & (self.units < end)]
        headings = self.headings[(self.headings[:, 0] >= start) & (self.headings[:, 1] < end)]
        units = np.append(np.int32(0), inside - np.int32(start))
        return PromptText(units, np.minimum(headings, end) - np.int32(start))


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
        self._texts = dict[int, str]()

    def read(self, tokens: TokenIds) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int32)
        with self._learning:
            self._learn(ids)
            kinds, indents = self._kinds[ids], self._indents[ids]
            pieces = [self._texts[token] for token in ids.tolist()]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units, _headings(kinds, indents), pieces)

    def _learn(self, ids: TokenIds) -> None:
        if ids.size and ids.max() >= self._kinds.size:
            missing = int(ids.max()) + 1 - self._kinds.size
            self._kinds = np.pad(self._kinds, (0, missing), constant_values=_UNKNOWN)
            self._indents = np.pad(self._indents, (0, missing))
        unknown = [int(token) for token in np.unique(ids[self._kinds[ids] == _UNKNOWN])]
        if unknown:
            pieces = self._tokenizer.convert_ids_to_tokens(unknown)
            for token, piece in zip(unknown, pieces, strict=True):
                self._texts[token] = text = self._text_of(token, piece)
                self._kinds[token], self._indents[token] = _kind_of(text)

    def _text_of(self, token: int, piece: Any) -> str:
        spaced = isinstance(piece, str) and piece.startswith(_SPACES)
        word = piece[spaced:] if isinstance(piece, str) else ""
        if word.isascii() and word.isalnum():  # most of a vocabulary: decoding takes ten times as long
            return " " * spaced + word
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            return " " + text
        return text


def _kind_of(text: str) -> tuple[int, int]:
    """Return a token's kind, and the blanks before its first character, behind a line break."""
    spaced = text.startswith(" ")
    if text.isascii() and text[spaced:].isalnum():  # most of a vocabulary
        return spaced * _BEGINS_WORD | text[spaced].isdigit() * _DIGIT, int(spaced)
    ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
    ends_sentence = text.rstrip(" ").endswith(_STOPS)
    ends_number = text.startswith(("\t", ":", "|", "-")) or not (text[:1].isascii() or text[:1].isalnum())
    kind = ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | ends_number * _ENDS_NUMBER
    kind |= text[:1].isspace() * _BEGINS_WORD
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
