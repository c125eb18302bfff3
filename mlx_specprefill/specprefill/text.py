"""Lines and sentences of a prompt, from its tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..token_ids import TokenIds

__all__ = ["PromptText", "TextReader"]

Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int32]

_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
# White space only; with a letter, a digit or a comma at its end; with a small letter at its beginning; more than one
# line break. White space around what can be seen does not count.
_BLANK, _GOES_ON, _SMALL, _PARAGRAPH = 16, 32, 64, 128
_DIGIT = 256  # a digit is the first that can be seen
_HEADING = 32  # tokens that a heading has at most
_WRAPPED = 6  # tokens that a line has at least if it was broken because it was full
_SPACES = ("\u0120", "\u2581")  # what stands for it in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")


@dataclass(frozen=True, slots=True)
class PromptText:
    """What selection knows of a prompt's text.

    Attributes:
        units: indices at which lines and sentences begin, ascending, the first of them 0; int32 (U,).
        sentences: those of them at which no sentence of the line before goes on.
        headings: short lines above lines that begin with numbers, as the name of a file above what was found in it:
            where each begins and ends, and where those lines end; int32 (H, 3).
    """

    units: Indices
    sentences: Indices
    headings: Indices = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))

    def since(self, start: int) -> PromptText:
        """Of the prompt from `start` on, where indices count from."""
        rest = (at[at > start] - np.int32(start) for at in (self.units, self.sentences))
        units, sentences = (np.append(np.int32(0), at) for at in rest)
        return PromptText(units, sentences, self.headings[self.headings[:, 0] >= start] - np.int32(start))


class TextReader:
    """Reads with a tokenizer of mlx-lm; each token id is decoded once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space. A
    sentence of hard-wrapped text goes on over line breaks.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint16)

    def read(self, tokens: TokenIds) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int32)
        self._learn(ids)
        kinds = self._kinds[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units, np.append(units[:1], units[1:][~_wrapped(kinds, units)]), _headings(kinds))

    def _learn(self, ids: TokenIds) -> None:
        if ids.size and ids.max() >= self._kinds.size:
            missing = int(ids.max()) + 1 - self._kinds.size
            self._kinds = np.pad(self._kinds, (0, missing), constant_values=_UNKNOWN)
        unknown = [int(token) for token in np.unique(ids[self._kinds[ids] == _UNKNOWN])]
        if unknown:
            pieces = self._tokenizer.convert_ids_to_tokens(unknown)
            for token, piece in zip(unknown, pieces, strict=True):
                self._kinds[token] = self._kind_of(token, piece)

    def _kind_of(self, token: int, piece: Any) -> int:
        spaced = isinstance(piece, str) and piece.startswith(_SPACES)
        word = piece[spaced:] if isinstance(piece, str) else ""
        if word.isascii() and word.isalnum():  # most of a vocabulary: decoding takes ten times as long
            return spaced * _BEGINS_WORD | _GOES_ON | word[0].islower() * _SMALL | word[0].isdigit() * _DIGIT
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            text = " " + text
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        ends_sentence = text.rstrip(" ").endswith(_STOPS)
        kind = ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | text[:1].isspace() * _BEGINS_WORD
        kind |= (text.count("\n") > 1) * _PARAGRAPH
        seen = text.strip()
        if not seen:
            return kind | _BLANK
        goes_on = seen[-1].isalnum() or seen[-1] == ","
        return kind | goes_on * _GOES_ON | seen[0].islower() * _SMALL | seen[0].isdigit() * _DIGIT


def _headings(kinds: npt.NDArray[np.uint16]) -> Indices:
    """See `PromptText.headings`. Lines without anything to see count for nothing."""
    M = kinds.size
    starts = np.append(0, np.flatnonzero(kinds[:-1] & _ENDS_LINE > 0) + 1).astype(np.int32)
    following = np.append(np.where(kinds & _BLANK == 0, np.arange(M), M), M)
    seen = np.minimum.accumulate(following[::-1])[::-1][starts]
    ends = np.append(starts[1:], M).astype(np.int32)
    shown = seen < ends
    starts, ends, seen = starts[shown], ends[shown], seen[shown]
    numbered = kinds[seen] & _DIGIT > 0
    heads = np.flatnonzero(~numbered[:-1] & numbered[1:])
    others = np.append(np.flatnonzero(~numbered), numbered.size)  # where a run of numbered lines ends
    last = others[np.searchsorted(others, heads, side="right")] - 1
    found = np.stack([starts[heads], ends[heads], ends[last]], axis=1)
    short: Indices = found[found[:, 1] - found[:, 0] <= _HEADING]
    return short


def _wrapped(kinds: npt.NDArray[np.uint16], units: Indices) -> Bools:
    """(U - 1,) whether the unit before each but the first is a full line whose sentence goes on.

    It is not short, ends with a letter, a digit or a comma, one line break follows, and then a small letter.
    """
    borders, index = units[1:], np.arange(kinds.size)
    seen = kinds & _BLANK == 0
    last = np.maximum.accumulate(np.where(seen, index, 0))[borders - 1]
    following = np.minimum.accumulate(np.where(seen, index, kinds.size - 1)[::-1])[::-1][borders]
    breaks = np.append(0, np.cumsum((kinds & _ENDS_LINE > 0) * 1 + (kinds & _PARAGRAPH > 0)))
    goes_on = (kinds[last] & _GOES_ON > 0) & (kinds[following] & _SMALL > 0)
    wrapped: Bools = goes_on & (breaks[following] - breaks[last] == 1) & (borders - units[:-1] >= _WRAPPED)
    return wrapped
