"""Lines and sentences of a prompt, from its tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..token_ids import TokenIds

__all__ = ["PromptText", "TextReader"]

Indices = npt.NDArray[np.int32]

_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
_BLANK = 16  # white space only
_DIGIT = 32  # a digit is the first that can be seen
_HEADING = 32  # tokens that a heading has at most
_SPACES = ("\u0120", "\u2581")  # what stands for it in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")


@dataclass(frozen=True, slots=True)
class PromptText:
    """What selection knows of a prompt's text.

    Attributes:
        units: indices at which lines and sentences begin, ascending, the first of them 0; int32 (U,).
        headings: short lines above lines that begin with numbers, as the name of a file above what was found in it:
            where each begins and ends, and where those lines end; int32 (H, 3).
    """

    units: Indices
    headings: Indices = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int32))

    def since(self, start: int) -> PromptText:
        """Of the prompt from `start` on, where indices count from."""
        units = np.append(np.int32(0), self.units[self.units > start] - np.int32(start))
        return PromptText(units, self.headings[self.headings[:, 0] >= start] - np.int32(start))


class TextReader:
    """Reads with a tokenizer of mlx-lm; each token id is decoded once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint8)

    def read(self, tokens: TokenIds) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int32)
        self._learn(ids)
        kinds = self._kinds[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units, _headings(kinds))

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
            return spaced * _BEGINS_WORD | word[0].isdigit() * _DIGIT
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            text = " " + text
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        ends_sentence = text.rstrip(" ").endswith(_STOPS)
        kind = ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | text[:1].isspace() * _BEGINS_WORD
        seen = text.strip()
        return kind | seen[:1].isdigit() * _DIGIT if seen else kind | _BLANK


def _headings(kinds: npt.NDArray[np.uint8]) -> Indices:
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
