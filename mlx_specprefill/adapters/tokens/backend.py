"""Encodes a text with a tokenizer of the package tokenizers: the one call that its next version changes."""

from __future__ import annotations

from tokenizers import Tokenizer


def encode_text(backend: Tokenizer, text: str, *, around: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a text's ids, and the characters [start, end) of each token.

    Args:
        around: with the tokens that the tokenizer puts before and after a text.
    """
    encoding = backend.encode(text, add_special_tokens=around)
    return encoding.ids, encoding.offsets
