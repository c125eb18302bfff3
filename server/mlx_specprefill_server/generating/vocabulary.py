"""Token ids as text. Holds the tokenizer; nothing else in the server decodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

__all__ = ["REPLACEMENT", "Vocabulary"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, the others for code points from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """Decodes the ids of one tokenizer, an mlx_lm TokenizerWrapper."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_of_char()
        # Of a fast tokenizer: what its own `decode` ends in, called once per generated token.
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None

    @cached_property
    def size(self) -> int:
        """Ids are 0..size-1."""
        return len(self._tokenizer)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """Added tokens: markers that stand for themselves, never for their spelling."""
        added: Mapping[str, int] = self._tokenizer.get_added_vocab()
        return added

    @cached_property
    def structural(self) -> tuple[int, ...]:
        """Ids without which answers don't end and lines don't break."""
        lines = self._tokenizer.encode("\n", add_special_tokens=False)
        return tuple(sorted({*lines[-1:], *self.stop_ids}))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text as it is: special tokens shown, spaces untouched."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token: int) -> str:
        """One token alone; a token that is part of a character shows as the replacement character."""
        text = self.decode([token])
        piece = self._piece(token)
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token: int) -> list[int]:
        """The UTF-8 bytes that the token stands for, also when they are not a whole character."""
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = self._piece(token)
        if match := BYTE_TOKEN.fullmatch(piece):
            return [int(match[1], 16)]
        if all(char in self._bytes for char in piece):
            return [self._bytes[char] for char in piece]
        return list(text.encode())

    def _piece(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens([token])[0] or ""
