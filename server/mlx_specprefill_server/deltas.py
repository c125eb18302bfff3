"""From token events to text that may be shown: whole characters, nothing of a stop string, tokens beside their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_specprefill import TokenEvent

from .vocabulary import REPLACEMENT

__all__ = ["AnswerText", "Delta", "IncrementalText", "StopMatcher"]

CONTEXT_TOKENS = 5  # of the prompt: how the first token reads (a leading space) depends on what precedes it
MOST_UNDECIDED = 8  # tokens; more that don't decode are garbage, or the replacement character itself
UNFINISHED_BYTES = 3  # at most, of one character

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly shown text of answer `index`, and the tokens that begin in it (only when logprobs are asked for)."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...] = ()


class IncrementalText:
    """The text of a growing list of tokens, never cut inside a character."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._tokens)  # tokens whose text has been given out

    def push(self, token: int) -> str:
        self._tokens.append(token)
        if not self._decode(self._tokens).endswith(REPLACEMENT):
            return self._take(len(self._tokens))
        if len(self._tokens) - self._read < MOST_UNDECIDED:
            return ""
        return self._take(len(self._tokens) - self._unfinished())

    def finish(self) -> str:
        return self._take(len(self._tokens))

    def _take(self, count: int) -> str:
        """The new text of the first `count` tokens; the newest of them stay as context."""
        before = self._decode(self._tokens[: self._read])
        after = self._decode(self._tokens[:count])
        del self._tokens[: self._read]
        self._read = count - self._read
        return after[len(before) :]

    def _unfinished(self) -> int:
        """How many last tokens may still become a character: cutting there changes nothing of the text."""
        whole = self._decode(self._tokens)
        cuts = range(UNFINISHED_BYTES, 0, -1)
        return next((n for n in cuts if self._decode(self._tokens[:-n]) + self._decode(self._tokens[-n:]) == whole), 0)


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and ends before the first one to be complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """What may be shown now."""
        if self.matched:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            return self._release(min(found)[1])
        return self._release(len(self._held) - max(map(self._overlap, self._stops), default=0))

    def finish(self) -> str:
        return "" if self.matched else self._release(len(self._held))

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper beginning of `stop` at the end of what is held."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class AnswerText:
    """One answer being written."""

    def __init__(
        self,
        index: int,
        decode: Decode,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        with_tokens: bool = False,
    ) -> None:
        self._index = index
        self._text = IncrementalText(decode, prompt)
        self._stop = StopMatcher(stops)
        self._stop_ids = stop_ids
        self._with_tokens = with_tokens
        self._waiting: deque[tuple[int, TokenEvent]] = deque()  # (where its text begins, token)
        self._decoded = self._shown = 0  # characters
        self.completion_tokens = 0  # up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """A stop string has been found; the rest of the tokens is not wanted."""
        return self._stop.matched

    def push(self, event: TokenEvent) -> Delta:
        """What one more token makes visible, often nothing."""
        if self.stopped:
            return Delta(self._index, "")
        self.completion_tokens += 1
        if event.token in self._stop_ids:
            return Delta(self._index, "")
        if self._with_tokens:
            self._waiting.append((self._decoded, event))
        return self._show(self._text.push(event.token))

    def finish(self) -> Delta:
        """What was held back and may be shown after all."""
        if self.stopped:
            return Delta(self._index, "")
        first = self._show(self._text.finish())
        rest = self._stop.finish()
        self._shown += len(rest)
        tokens = first.tokens + (() if self.stopped else self._ready(everything=True))
        return Delta(self._index, first.text + rest, tokens)

    def _show(self, decoded: str) -> Delta:
        self._decoded += len(decoded)
        shown = self._stop.push(decoded)
        self._shown += len(shown)
        return Delta(self._index, shown, self._ready())

    def _ready(self, everything: bool = False) -> tuple[TokenEvent, ...]:
        ready = []
        while self._waiting and (everything or self._waiting[0][0] < self._shown):
            ready.append(self._waiting.popleft()[1])
        return tuple(ready)
