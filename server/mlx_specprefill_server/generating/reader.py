"""The reader of one answer: from engine events to answer deltas, for every dialect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import orjson

from mlx_specprefill import EngineClosedError, Failed, Finished, PrefillReport, TokenEvent

from ..deltas import (
    AnswerDelta,
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    FinishReason,
    ReasoningDelta,
    TextDelta,
)
from ..parsers.parser import Parser
from .detokenizer import NO_STOPS, IncrementalDetokenizer, StopMatcher, Stops

__all__ = ["AnswerReader"]


class AnswerReader:
    """A reader of one answer. Stop strings end its visible text; without `parallel`, so does the first call.

    Args:
        end_ids: token ids that count but add no text.
        forced: the answer is calls only. It ends before a repeated call. Text, which could only be half a call, is
            dropped.
        with_tokens: each delta carries the tokens that begin in its text.
        every_token: tokens at the very end that decode to nothing come with an empty text.

    Attributes:
        over: no further token is wanted; the engine can stop.
        completion_tokens: number of tokens, up to the one that completed a stop string.
        read_tokens: number of tokens whose text has been read.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        parser: Parser,
        stops: Stops = NO_STOPS,
        *,
        end_ids: frozenset[int] = frozenset(),
        parallel: bool = True,
        forced: bool = False,
        with_tokens: bool = False,
        every_token: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._parser = parser
        self._stop = StopMatcher(stops)
        self._end_ids = end_ids
        self._parallel = parallel
        self._distinct = _DistinctCalls() if forced else None
        self._tokens = _Tokens() if with_tokens else None
        self._as_parsed = not (stops.strings or forced or with_tokens)  # text is shown as the parser gives it
        self._every_token = every_token
        self._new_ids: list[int] = []
        self._calls = 0  # number of calls that are not broken
        self._reasoning_tokens = 0
        self.completion_tokens = self.read_tokens = 0
        self.over = False

    def push(self, event: TokenEvent) -> list[ContentDelta]:
        """Add one token and return the deltas that it completes, often none."""
        if self.over:
            return []
        self.completion_tokens += 1
        if event.token in self._end_ids:
            return []
        if self._tokens is not None:
            self._tokens.add(event)
            self._new_ids.append(event.token)
        return self._read(self._detokenizer.push(event.token))

    def finish(self, event: Finished | Failed, report: PrefillReport) -> list[AnswerDelta]:
        """Return the rest of the answer and its end."""
        deltas: list[AnswerDelta] = [] if self.over else [*self._read(self._detokenizer.finish())]
        ended = isinstance(event, Finished) and (self.over or event.reason == "stop")
        if self._parser.thinking and not self.over:
            self._reasoning_tokens = self.completion_tokens
        if not self.over:
            deltas += self._limit(self._parser.finish(ended))
        deltas += self._release(self._stop.finish())
        if self._every_token and self._tokens is not None and not self.over and (tokens := self._tokens.rest()):
            deltas.append(TextDelta("", tokens))
        if ended:
            return [*deltas, self._done("tool_calls" if self._calls else "stop", report)]
        return [*deltas, self.failed(_error(event), report)]

    def failed(self, error: Exception | None, report: PrefillReport) -> AnswerDone:
        """Return the end of an incomplete answer. `error` is None if it has reached its length."""
        return self._done("length", report, error)

    def take_ids(self) -> list[int]:
        """Return the token ids since the last call. Only `with_tokens`."""
        ids, self._new_ids = self._new_ids, []
        return ids

    def _done(self, reason: FinishReason, report: PrefillReport, error: Exception | None = None) -> AnswerDone:
        return AnswerDone(reason, self.completion_tokens, self._reasoning_tokens, report, self._stop.matched, error)

    def _read(self, text: str) -> list[ContentDelta]:
        if not text:
            return []
        self.read_tokens = self.completion_tokens
        if self._tokens is not None:
            self._tokens.decoded += len(text)
        thinking = self._parser.thinking
        deltas = self._limit(self._parser.push(text))
        if thinking or self._parser.thinking:
            self._reasoning_tokens = self.completion_tokens
        return deltas

    def _limit(self, parsed: Sequence[ContentDelta]) -> list[ContentDelta]:
        """Return the parsed deltas that the request wants."""
        out: list[ContentDelta] = []
        for delta in parsed:
            if self._as_parsed and isinstance(delta, (TextDelta, ReasoningDelta)):
                out.append(delta)
                continue
            for wanted in self._shown(delta):
                out += [wanted] if self._distinct is None else self._distinct.push(wanted)
            self.over = self.over or (self._distinct is not None and self._distinct.repeated)
            if self.over:
                break
        return out

    def _shown(self, delta: ContentDelta) -> Iterator[ContentDelta]:
        match delta:
            case ReasoningDelta():
                yield self._with_tokens(delta)
            case TextDelta():
                if self._distinct is None:
                    yield from self._visible(delta)
            case CallStart():
                self._calls += 1
                yield from self._release(self._stop.finish())
                yield delta
            case CallDelta():
                yield delta
            case CallEnd():
                self.over = not self._parallel
                yield delta
            case CallBroken():
                self._calls -= 1
                yield delta

    def _with_tokens(self, delta: ReasoningDelta) -> ReasoningDelta:
        if self._tokens is None:
            return delta
        self._tokens.hold(delta)
        return ReasoningDelta(delta.text, self._tokens.release(len(delta.text)), delta.start)

    def _visible(self, delta: TextDelta) -> Iterator[TextDelta]:
        if self._tokens is not None:
            self._tokens.hold(delta)
        yield from self._release(self._stop.push(delta.text))
        self.over = self._stop.matched is not None

    def _release(self, text: str) -> list[TextDelta]:
        tokens = () if self._tokens is None else self._tokens.release(len(text))
        return [TextDelta(text, tokens)] if text or tokens else []


def _error(event: Finished | Failed) -> Exception | None:
    if isinstance(event, Failed):
        return event.error
    return EngineClosedError("the server is shutting down") if event.reason == "cancelled" else None


class _DistinctCalls:
    """A filter that holds back each call after the first until it is complete and differs from all before.

    Attributes:
        repeated: a call was made twice.
    """

    def __init__(self) -> None:
        self._made: set[tuple[str, bytes]] = set()
        self._name = ""
        self._held: list[ContentDelta] = []
        self.repeated = False

    def push(self, delta: ContentDelta) -> list[ContentDelta]:
        """Add a delta and return the deltas that can be shown now."""
        match delta:
            case CallStart():
                self._name = delta.name
                if not self._made:
                    return [delta]
                self._held = [delta]
                return []
            case CallDelta() if self._held:
                self._held.append(delta)
                return []
            case CallBroken() if self._held:
                self._held = []
                return []
            case CallEnd():
                return self._complete(delta)
        return [delta]

    def _complete(self, end: CallEnd) -> list[ContentDelta]:
        held, self._held = self._held, []
        made = self._name, orjson.dumps(orjson.loads(end.arguments), option=orjson.OPT_SORT_KEYS)
        self.repeated = made in self._made
        self._made.add(made)
        return [] if self.repeated else [*held, end]


class _Tokens:
    """Tokens that wait for the text that they begin in. Tokens that only write tags are dropped.

    Attributes:
        decoded: characters of the answer so far, tags included.
    """

    def __init__(self) -> None:
        self.decoded = 0
        self._waiting: deque[tuple[int, TokenEvent]] = deque()  # (first character, token)
        self._held: deque[list[int]] = deque()  # places of text that a stop string holds back: [start, end]

    def add(self, token: TokenEvent) -> None:
        self._waiting.append((self.decoded, token))

    def hold(self, delta: TextDelta | ReasoningDelta) -> None:
        if self._waiting:
            self._held.append([delta.start, delta.start + len(delta.text)])

    def release(self, count: int) -> tuple[TokenEvent, ...]:
        """Return the tokens that begin in the next `count` characters of held text."""
        out: list[TokenEvent] = []
        while count and self._held:
            span = self._held[0]
            size = min(count, span[1] - span[0])
            out += self._take(span[0], span[0] + size)
            count -= size
            span[0] += size
            if span[0] == span[1]:
                self._held.popleft()
        return tuple(out)

    def rest(self) -> tuple[TokenEvent, ...]:
        """Return the tokens that no text has taken."""
        return tuple(token for _, token in self._waiting)

    def _take(self, start: int, end: int) -> Iterator[TokenEvent]:
        while self._waiting and self._waiting[0][0] < end:
            first, token = self._waiting.popleft()
            behind = self._waiting[0][0] if self._waiting else self.decoded
            if first >= start or behind > start:
                yield token
