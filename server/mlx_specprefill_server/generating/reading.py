"""One answer on its way from generated text to pieces that a dialect can write."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from uuid import uuid4

import orjson

from mlx_specprefill import TokenEvent

from ..parsers.events import CallClosed, CallFailed, CallOpened, CallWritten, Event, Parser, Said
from .answers import (
    AnswerDone,
    AnswerPiece,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    FinishReason,
    ReasoningDelta,
    TextDelta,
)
from .deltas import NO_STOPS, Delta, StopMatcher, Stops
from .generation import Done

__all__ = ["AnswerReader"]


class AnswerReader:
    """Reads answer `index`. Stop strings end its visible text; without `parallel`, so does the first call.

    A `forced` answer is calls and nothing else: it ends before a call that was made already, and has no text, which
    could only be half of a call.
    """

    def __init__(
        self, index: int, parser: Parser, stops: Stops = NO_STOPS, parallel: bool = True, forced: bool = False
    ) -> None:
        self._index = index
        self._parser = parser
        self._stop = StopMatcher(stops)
        self._parallel = parallel
        self._calls = _NewCalls() if forced else None
        self._tokens = _Tokens()
        self._opened = 0  # calls, of which those `_broken` are none
        self._broken = 0
        self._arguments: list[str] = []  # of the open call
        self._reasoning_tokens = 0
        self.over = False  # nothing of what may still come is wanted

    def push(self, delta: Delta) -> list[AnswerPiece]:
        """What a piece of raw text adds to the answer."""
        if self.over:
            return []
        thinking = self._parser.thinking
        self._tokens.add(delta)
        pieces = list(self._pieces(self._parser.push(delta.text)))
        if thinking or self._parser.thinking:
            self._reasoning_tokens = delta.completion_tokens
        return pieces

    def finish(self, end: Done) -> list[AnswerPiece]:
        """The rest of the answer, and its end."""
        complete = end.finish_reason == "stop" and end.error is None
        if self._parser.thinking and not self.over:
            self._reasoning_tokens = end.completion_tokens
        pieces = [] if self.over else list(self._pieces(self._parser.finish(complete)))
        pieces += self._release(self._stop.finish())
        reason: FinishReason = "tool_calls" if complete and self._opened > self._broken else end.finish_reason
        return [*pieces, self._done(reason, end)]

    def failed(self, end: Done) -> AnswerDone:
        """The end of an answer that can't be read on."""
        return self._done("length", end)

    def _done(self, reason: FinishReason, end: Done) -> AnswerDone:
        return AnswerDone(
            index=self._index,
            finish_reason=reason,
            completion_tokens=end.completion_tokens,
            reasoning_tokens=self._reasoning_tokens,
            account=end.account,
            stop_string=self._stop.matched,
            error=end.error,
        )

    def _pieces(self, events: list[Event]) -> Iterator[AnswerPiece]:
        for event in events:
            for piece in self._piece(event):
                yield from [piece] if self._calls is None else self._calls.passed(piece)
            self.over = self.over or (self._calls is not None and self._calls.repeated)
            if self.over:
                break

    def _piece(self, event: Event) -> Iterator[AnswerPiece]:
        match event:
            case Said(reasoning=True):
                yield ReasoningDelta(self._index, event.text, self._tokens.of(event))
            case Said() if self._calls is None:
                yield from self._visible(event)
            case CallOpened():
                yield from self._release(self._stop.finish())
                self._arguments = []
                self._opened += 1
                yield CallStart(self._index, self._opened - 1, f"call_{uuid4().hex[:24]}", event.name)
            case CallWritten():
                self._arguments.append(event.text)
                yield CallDelta(self._index, self._opened - 1, event.text)
            case CallClosed():
                yield CallEnd(self._index, self._opened - 1, "".join(self._arguments))
                self.over = not self._parallel
            case CallFailed():
                self._broken += 1
                yield CallBroken(self._index, self._opened - 1)

    def _visible(self, said: Said) -> Iterator[AnswerPiece]:
        self._tokens.hold(said)
        yield from self._release(self._stop.push(said.text))
        self.over = self._stop.matched is not None

    def _release(self, text: str) -> list[AnswerPiece]:
        tokens = self._tokens.release(len(text))
        return [TextDelta(self._index, text, tokens)] if text or tokens else []


class _NewCalls:
    """Holds back each call after the first until it is whole, and known to be another one than those before.

    Attributes:
        repeated: a call was made twice.
    """

    def __init__(self) -> None:
        self._made: set[tuple[str, bytes]] = set()
        self._name = ""
        self._held: list[AnswerPiece] = []
        self.repeated = False

    def passed(self, piece: AnswerPiece) -> list[AnswerPiece]:
        """What may go on."""
        match piece:
            case CallStart():
                self._name = piece.name
                if not self._made:
                    return [piece]
                self._held = [piece]
                return []
            case CallDelta() if self._held:
                self._held.append(piece)
                return []
            case CallBroken() if self._held:
                self._held = []
                return []
            case CallEnd():
                return self._whole(piece)
        return [piece]

    def _whole(self, end: CallEnd) -> list[AnswerPiece]:
        held, self._held = self._held, []
        made = self._name, orjson.dumps(orjson.loads(end.arguments), option=orjson.OPT_SORT_KEYS)
        self.repeated = made in self._made
        self._made.add(made)
        return [] if self.repeated else [*held, end]


class _Tokens:
    """Tokens until the text that they begin in is shown. Those that only write tags are shown with nothing."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, TokenEvent]] = deque()  # (first character, the one behind the last, token)
        self._shown: deque[list[int]] = deque()  # places of text that a stop string holds back: [start, end]

    def add(self, delta: Delta) -> None:
        ends = (*delta.starts[1:], delta.end)[: len(delta.starts)]
        self._waiting.extend(zip(delta.starts, ends, delta.tokens, strict=True))

    def of(self, said: Said) -> tuple[TokenEvent, ...]:
        """The tokens of text that is shown at once."""
        self.hold(said)
        return self.release(len(said.text))

    def hold(self, said: Said) -> None:
        if self._waiting:
            self._shown.append([said.start, said.start + len(said.text)])

    def release(self, count: int) -> tuple[TokenEvent, ...]:
        """The tokens that begin in the next `count` characters of text that is held."""
        out: list[TokenEvent] = []
        while count and self._shown:
            span = self._shown[0]
            size = min(count, span[1] - span[0])
            out += self._take(span[0], span[0] + size)
            count -= size
            span[0] += size
            if span[0] == span[1]:
                self._shown.popleft()
        return tuple(out)

    def _take(self, start: int, end: int) -> Iterator[TokenEvent]:
        while self._waiting and self._waiting[0][0] < end:
            begin, behind, token = self._waiting.popleft()
            if begin >= start or behind > start:
                yield token
