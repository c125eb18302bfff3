"""Text of token ids for streaming: whole characters, and nothing of a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_specprefill import TokenIds

__all__ = ["NO_STOPS", "REPLACEMENT", "IncrementalDetokenizer", "StopMatcher", "Stops", "Vocabulary"]

CONTEXT_TOKENS = 5  # tokens of the prompt: the first token's text (a leading space) depends on them
MOST_CONTEXT = 24  # tokens; cutting the context costs a decode, so it happens only every so often
MOST_UNDECIDED = 8  # tokens; more undecodable ones are garbage, or the replacement character itself
UNFINISHED_BYTES = 3  # bytes of an unfinished character, at most

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of a growing list of tokens, never cut inside a character."""

    def __init__(self, decode: Decode, prompt: Sequence[int] | TokenIds = ()) -> None:
        self._decode = decode
        self._tokens = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._given = len(self._tokens)  # number of tokens whose text has been returned
        self._given_text = decode(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._take(len(self._tokens), text)
        if len(self._tokens) - self._given < MOST_UNDECIDED:
            return ""
        count = len(self._tokens) - self._count_unfinished(text)
        return self._take(count, self._decode(self._tokens[:count]))

    def finish(self) -> str:
        return self._take(len(self._tokens), self._decode(self._tokens))

    def _take(self, count: int, text: str) -> str:
        """Return the new part of `text`, the text of the first `count` tokens. Keep the newest of them as context."""
        new = text[len(self._given_text) :]
        self._given, self._given_text = count, text
        if count > MOST_CONTEXT:
            del self._tokens[: count - CONTEXT_TOKENS]
            self._given, self._given_text = CONTEXT_TOKENS, self._decode(self._tokens[:CONTEXT_TOKENS])
        return new

    def _count_unfinished(self, text: str) -> int:
        """Return the number of last tokens that may still become one character. A cut before them leaves the text
        unchanged.
        """
        cuts = range(UNFINISHED_BYTES, 0, -1)
        return next((n for n in cuts if self._decode(self._tokens[:-n]) + self._decode(self._tokens[-n:]) == text), 0)


@dataclass(frozen=True, slots=True)
class Stops:
    """Strings that end an answer. With `shown`, the stop string is part of the text."""

    strings: tuple[str, ...] = ()
    shown: bool = False


NO_STOPS = Stops()


class StopMatcher:
    """A matcher that holds back a possible stop string and ends at the first complete one."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops.strings
        self._shown = stops.shown
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the part that can be shown now."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at, self.matched = min(found)
            return self._release(end if self._shown else at)
        return self._release(len(self._held) - max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _overlap(self, stop: str) -> int:
        """Return the length of the longest proper beginning of `stop` at the end of the held text."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """Return the alphabet of byte-level BPE. Printable bytes stand for themselves, the others for code points from 256
    up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Vocabulary:
    """The token texts of one tokenizer, an mlx_lm TokenizerWrapper."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_of_char()
        # The innermost function of a fast tokenizer's `decode`. It runs once per generated token.
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None

    @cached_property
    def size(self) -> int:
        """The number of ids, which are 0..size-1."""
        return len(self._tokenizer)

    @cached_property
    def special(self) -> Mapping[str, int]:
        """The added tokens: markers that stand for themselves, never for their spelling."""
        added: Mapping[str, int] = self._tokenizer.get_added_vocab()
        return added

    @cached_property
    def structural(self) -> tuple[int, ...]:
        """The ids without which answers don't end and lines don't break."""
        lines = self._tokenizer.encode("\n", add_special_tokens=False)
        return tuple(sorted({*lines[-1:], *self.stop_ids}))

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        return frozenset(self._tokenizer.eos_token_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text unchanged: special tokens shown, spaces untouched."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token. A part of a character shows as the replacement character."""
        text = self.decode([token])
        piece = self._piece(token)
        return f" {text}" if piece.startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token: int) -> list[int]:
        """Return the UTF-8 bytes of a token, also when they are not a whole character."""
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
