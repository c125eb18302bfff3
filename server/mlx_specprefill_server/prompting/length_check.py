"""Whether a text can fit the context at all, at no more cost than reading what could fit."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import orjson

from mlx_specprefill import ContextLengthError

__all__ = ["LengthCheck"]

PIECE = 16  # characters per token of the context that are tokenized at a time: several times what prose has
SLACK = 2  # times the context: tokens of pieces may be a few more than those of the whole, at the cuts


class LengthCheck:
    """Refuses texts that must have more tokens than the context, long before all of them is tokenized.

    Args:
        context_length: tokens; None: nothing is refused.
        count: how many tokens a piece of text has.
    """

    def __init__(self, tokenizer: Any, context_length: int | None, count: Callable[[str], int]) -> None:
        self._context = context_length
        self._longest = _longest_token(tokenizer)
        self._count = count

    def check_length(self, characters: int, field: str) -> None:
        """By the tokenizer's longest token.

        Raises:
            ContextLengthError: no tokenization can make it fit; its count of tokens is the least that there can be.
        """
        if self._context is not None and self._longest and characters > self._context * self._longest:
            self._refuse(-(-characters // self._longest), field)

    def check(self, text: str, field: str) -> None:
        """The same, and piece by piece: the work is bounded by the context whatever the text.

        Raises:
            ContextLengthError: as `check_length`.
        """
        self.check_length(len(text), field)
        if self._context is None or len(text) <= PIECE * self._context:
            return
        step, tokens = PIECE * max(1, self._context), 0
        for start in range(0, len(text), step):
            tokens += self._count(text[start : start + step])
            if tokens > SLACK * self._context:
                self._refuse(tokens, field)

    def _refuse(self, tokens: int, field: str) -> None:
        assert self._context is not None
        error = ContextLengthError(tokens, 1, self._context)
        error.field = field
        raise error


def _longest_token(tokenizer: Any) -> int:
    """Characters that one token can stand for; 0 where one may stand for any number.

    That is so where unknown characters or the spaces around a special token disappear in it, and where characters are
    taken away before. Composing (NFC) makes at most one out of four.
    """
    backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
    splits = repr(backend and backend.pre_tokenizer)
    every_character = "ByteLevel(" in splits or getattr(backend and backend.model, "byte_fallback", False)
    if backend is None or not every_character or "Removed" in splits:
        return 0
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    return _composed(backend.normalizer) * max(map(len, backend.get_vocab()))


def _composed(normalizer: Any) -> int:
    """How many characters may become one; 0: any number."""
    match type(normalizer).__name__:
        case "NoneType" | "Prepend" | "Lowercase" | "NFD" | "NFKD":
            return 1
        case "NFC" | "NFKC":
            return 4
        case "Replace":
            rule = orjson.loads(normalizer.__getstate__())
            return int(len(rule["pattern"].get("String", "")) in range(1, len(rule["content"]) + 1))
        case "Sequence":
            return prod(map(_composed, normalizer))
    return 0
