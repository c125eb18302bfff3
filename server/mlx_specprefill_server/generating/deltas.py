"""From token events to text that may be shown: whole characters, nothing of a stop string, tokens beside their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_specprefill import TokenEvent

from .vocabulary import REPLACEMENT

__all__ = ["NO_STOPS", "AnswerText", "Delta", "IncrementalText", "StopMatcher", "Stops"]

CONTEXT_TOKENS = 5  # of the prompt: how the first token reads (a leading space) depends on what precedes it
MOST_CONTEXT = 24  # tokens; cutting the context back costs a decode, so it is not done for every token
MOST_UNDECIDED = 8  # tokens; more that don't decode are garbage, or the replacement character itself
UNFINISHED_BYTES = 3  # at most, of one character

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly shown text of answer `index`, and the tokens that begin in it (only when logprobs are asked for).

    Attributes:
        starts: where the text of each token begins, in characters of the answer; `end` is where this delta ends.
        completion_tokens: of the answer so far.
    """

    index: int
    text: str
    tokens: tuple[TokenEvent, ...] = ()
    starts: tuple[int, ...] = ()
    end: int = 0
    completion_tokens: int = 0


class IncrementalText:
    """The text of a growing list of tokens, never cut inside a character."""

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
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
    """Strings that end an answer. `shown`: the one that does is part of it."""

    strings: tuple[str, ...] = ()
    shown: bool = False


NO_STOPS = Stops()


class StopMatcher:
    """Holds back what may be the beginning of a stop string, and ends with the first one to be complete."""

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


class AnswerText:
    """One answer being written."""

    def __init__(
        self,
        index: int,
        decode: Decode,
        prompt: Sequence[int],
        stops: Stops = NO_STOPS,
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
        self._halted = False
        self.completion_tokens = 0  # up to the one that completed a stop string

    @property
    def stopped(self) -> bool:
        """A stop string has been found; the rest of the tokens is not wanted."""
        return self._halted or self._stop.matched is not None

    def halt(self) -> None:
        """As if a stop string had been found."""
        self._halted = True

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
        decoded = self._text.finish()
        self._decoded += len(decoded)
        text = self._stop.push(decoded)
        text += self._stop.finish()
        return self._delta(text, everything=not self.stopped)

    def _show(self, decoded: str) -> Delta:
        self._decoded += len(decoded)
        return self._delta(self._stop.push(decoded))

    def _delta(self, text: str, everything: bool = False) -> Delta:
        self._shown += len(text)
        ready = []
        while self._waiting and (everything or self._waiting[0][0] < self._shown):
            ready.append(self._waiting.popleft())
        tokens, starts = tuple(token for _, token in ready), tuple(start for start, _ in ready)
        return Delta(self._index, text, tokens, starts, self._shown, self.completion_tokens)
