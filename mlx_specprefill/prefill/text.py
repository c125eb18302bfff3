"""Lines, sentences and shared words of a prompt, from its tokens alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["PromptText", "TextReader"]

Indices = npt.NDArray[np.int32]

_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
_SPACES = ("\u0120", "\u2581")  # what stands for it in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")
_RARE = 8  # units at most that share a word that says something
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class PromptText:
    """What selection knows of a prompt's text.

    Attributes:
        units: indices at which lines and sentences begin, ascending, the first of them 0; int32 (U,).
        rare: words that two to eight units share, by the first place in each: [start, end) of its tokens and a number
            that all places of a word have; int32 (P, 3), ordered by word.
    """

    units: Indices
    rare: Indices

    def since(self, start: int) -> PromptText:
        """Of the prompt from `start` on, where indices count from."""
        units = self.units[self.units > start] - np.int32(start)
        rare = self.rare[self.rare[:, 0] >= start] - np.array([start, start, 0], dtype=np.int32)
        return PromptText(np.append(np.int32(0), units), rare)


class TextReader:
    """Reads with a tokenizer of mlx-lm; each token id is decoded once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space. A word is a run of
    letters, digits and underscores; where a script puts no spaces between words, that is a clause.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint8)
        self._texts = np.full(0, "", dtype=object)

    def read(self, tokens: Sequence[int]) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int64)
        self._learn(ids)
        kinds = self._kinds[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units, _rare(self._texts[ids].tolist(), units))

    def _learn(self, ids: npt.NDArray[np.int64]) -> None:
        if ids.size and ids.max() >= self._kinds.size:
            missing = int(ids.max()) + 1 - self._kinds.size
            self._kinds = np.pad(self._kinds, (0, missing), constant_values=_UNKNOWN)
            self._texts = np.pad(self._texts, (0, missing), constant_values="")
        unknown = [int(token) for token in np.unique(ids[self._kinds[ids] == _UNKNOWN])]
        if unknown:
            pieces = self._tokenizer.convert_ids_to_tokens(unknown)
            for token, piece in zip(unknown, pieces, strict=True):
                self._kinds[token], self._texts[token] = self._read_token(token, piece)

    def _read_token(self, token: int, piece: Any) -> tuple[int, str]:
        spaced = isinstance(piece, str) and piece.startswith(_SPACES)
        word = piece[spaced:] if isinstance(piece, str) else ""
        if word.isascii() and word.isalnum():
            return spaced * _BEGINS_WORD, " " * spaced + word  # most of a vocabulary: decoding takes ten times as long
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            text = " " + text
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        ends_sentence = text.rstrip(" ").endswith(_STOPS)
        kind = ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | text[:1].isspace() * _BEGINS_WORD
        return kind, text


def _rare(texts: Sequence[str], units: Indices) -> Indices:
    ends = np.cumsum([len(text) for text in texts])
    found = [(word.group(), *word.span()) for word in _WORD.finditer("".join(texts))]
    if not found:
        return np.zeros((0, 3), dtype=np.int32)
    words, starts, stops = zip(*found, strict=True)
    numbers: dict[str, int] = {}
    word = np.array([numbers.setdefault(text, len(numbers)) for text in words])
    start = np.searchsorted(ends, starts, side="right")
    end = np.searchsorted(ends, stops, side="left") + 1
    unit = np.searchsorted(units, start, side="right") - 1
    each, at = np.unique(word * units.size + unit, return_index=True)  # a word's first place in each unit
    word = each // units.size
    shared = np.bincount(word)[word]
    kept = (shared > 1) & (shared <= _RARE)
    return np.stack([start[at], end[at], word], axis=1)[kept].astype(np.int32)
