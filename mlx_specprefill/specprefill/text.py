"""Lines and sentences of a prompt, from its tokens alone."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class PromptText:
    """What selection knows of a prompt's text.

    Attributes:
        units: indices at which lines and sentences begin, ascending, the first of them 0; int32 (U,).
    """

    units: Indices

    def since(self, start: int) -> PromptText:
        """Of the prompt from `start` on, where indices count from."""
        units = self.units[self.units > start] - np.int32(start)
        return PromptText(np.append(np.int32(0), units))


class TextReader:
    """Reads with a tokenizer of mlx-lm; each token id is decoded once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint8)

    def read(self, tokens: Sequence[int]) -> PromptText:
        ids = np.asarray(tokens, dtype=np.int64)
        self._learn(ids)
        kinds = self._kinds[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        units = np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)
        return PromptText(units)

    def _learn(self, ids: npt.NDArray[np.int64]) -> None:
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
        if word.isascii() and word.isalnum():
            return spaced * _BEGINS_WORD  # most of a vocabulary: decoding takes ten times as long
        text: str = self._tokenizer.decode([token])
        if spaced and not text[:1].isspace():  # decoding drops the space of a SentencePiece token
            text = " " + text
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        ends_sentence = text.rstrip(" ").endswith(_STOPS)
        return ends_line * _ENDS_LINE | ends_sentence * _ENDS_SENTENCE | text[:1].isspace() * _BEGINS_WORD
