"""Where lines and sentences of a prompt begin, from its tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["TextUnits"]

_UNKNOWN, _ENDS_LINE, _ENDS_SENTENCE, _BEGINS_WORD = 1, 2, 4, 8
_SPACES = ("\u0120", "\u2581")  # what stands for it in byte-level and in SentencePiece vocabularies
_STOPS, _WIDE_STOPS = (".", "!", "?"), ("。", "！", "？")


class TextUnits:
    """Finds units with a tokenizer of mlx-lm; each token id is decoded once.

    A unit ends with a token that holds a line break, or with a sentence's full stop before a space.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.full(0, _UNKNOWN, dtype=np.uint8)

    def starts(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Indices at which units begin, ascending, the first of them 0; int32 (U,)."""
        ids = np.asarray(tokens, dtype=np.int64)
        if ids.size and ids.max() >= self._kinds.size:
            missing = int(ids.max()) + 1 - self._kinds.size
            self._kinds = np.pad(self._kinds, (0, missing), constant_values=_UNKNOWN)
        unknown = [int(token) for token in np.unique(ids[self._kinds[ids] == _UNKNOWN])]
        if unknown:
            pieces = self._tokenizer.convert_ids_to_tokens(unknown)
            self._kinds[unknown] = [self._kind(*known) for known in zip(unknown, pieces, strict=True)]
        kinds = self._kinds[ids]
        before, after = kinds[:-1], kinds[1:]
        sentence = (before & _ENDS_SENTENCE > 0) & (after & _BEGINS_WORD > 0)
        return np.append(0, np.flatnonzero((before & _ENDS_LINE > 0) | sentence) + 1).astype(np.int32)

    def _kind(self, token: int, piece: Any) -> int:
        spaced = isinstance(piece, str) and piece.startswith(_SPACES)
        word = piece[spaced:] if isinstance(piece, str) else ""
        if word.isascii() and word.isalnum():
            return spaced * _BEGINS_WORD  # most of a vocabulary: decoding takes ten times as long
        text: str = self._tokenizer.decode([token])
        ends_line = "\n" in text or text.endswith(_WIDE_STOPS)
        begins_word = text[:1].isspace() or spaced  # decoding drops the space of a SentencePiece token
        return ends_line * _ENDS_LINE | text.rstrip(" ").endswith(_STOPS) * _ENDS_SENTENCE | begins_word * _BEGINS_WORD
