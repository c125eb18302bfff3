"""From token ids to text that may be shown: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_specprefill import TokenIds

from .vocabulary import REPLACEMENT

__all__ = ["NO_STOPS", "IncrementalDetokenizer", "StopMatcher", "Stops"]

CONTEXT_TOKENS = 5  # of the prompt: how the first token reads (a leading space) depends on what precedes it
MOST_CONTEXT = 24  # tokens; cutting the context back costs a decode, so it is not done for every token
MOST_UNDECIDED = 8  # tokens; more that don't decode are garbage, or the replacement character itself
UNFINISHED_BYTES = 3  # at most, of one character

Decode = Callable[[Sequence[int]], str]


class IncrementalDetokenizer:
    """The text of a growing list of tokens, never cut inside a character."""

    def __init__(self, decode: Decode, prompt: Sequence[int] | TokenIds = ()) -> None:
        self._decode = decode
        self._tokens = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._given = len(self._tokens)  # tokens whose text has been given out
        self._given_text = decode(self._tokens)

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT):
            return self._take(len(self._tokens), text)
        if len(self._tokens) - self._given < MOST_UNDECIDED:
            return ""
        count = len(self._tokens) - self._unfinished(text)
        return self._take(count, self._decode(self._tokens[:count]))

    def finish(self) -> str:
        return self._take(len(self._tokens), self._decode(self._tokens))

    def _take(self, count: int, text: str) -> str:
        """The new part of `text`, which is that of the first `count` tokens; the newest of them stay as context."""
        new = text[len(self._given_text) :]
        self._given, self._given_text = count, text
        if count > MOST_CONTEXT:
            del self._tokens[: count - CONTEXT_TOKENS]
            self._given, self._given_text = CONTEXT_TOKENS, self._decode(self._tokens[:CONTEXT_TOKENS])
        return new

    def _unfinished(self, text: str) -> int:
        """How many last tokens may still become a character: cutting there changes nothing of the text."""
        cuts = range(UNFINISHED_BYTES, 0, -1)
        return next((n for n in cuts if self._decode(self._tokens[:-n]) + self._decode(self._tokens[-n:]) == text), 0)


@dataclass(frozen=True, slots=True)
class Stops:
    """Strings that end an answer. `shown`: the stop string that ended it is part of the text."""

    strings: tuple[str, ...] = ()
    shown: bool = False


NO_STOPS = Stops()


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and ends with the first stop string that is complete."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops.strings
        self._shown = stops.shown
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What may be shown now."""
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
        """Length of the longest proper beginning of `stop` at the end of what is held."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
