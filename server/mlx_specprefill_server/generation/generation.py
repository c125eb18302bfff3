"""The answers to one request, from events to deltas: copies and their seeds, keep-alive signs, deadlines, slow readers.

Events arrive through `ThreadsafeCalls`. Everything else in this module runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

from mlx_specprefill import (
    Engine,
    EngineClosedError,
    EngineError,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PrefillReport,
    Progress,
    RequestHandle,
    TokenEvent,
    TokenIds,
    Verdict,
)

from ..deltas import AnswerDelta, AnswerDone, Idle
from .event_loop import KeepAliveTimer, ThreadsafeCalls
from .reader import AnswerReader

logger = logging.getLogger(__name__)

STREAM_BUFFER = 4096  # events of each answer that may wait while a client takes earlier ones; more of them end all
KEEP_ALIVE_S = 5.0


class SlowReaderError(EngineError):
    """The client does not read its stream."""

    def __init__(self, buffer: int) -> None:
        super().__init__(
            f"The client has read too slowly: {buffer} events were waiting for it, so the answer was "
            "stopped. Read the stream without pauses."
        )


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """The engine's request for the answers to one prompt, and a maker of their readers."""

    request: GenerationRequest
    reader: Callable[[], AnswerReader]


@dataclass(frozen=True, slots=True)
class AnswerResult:
    """The engine's end of one answer, for metrics and logs. It exists for clients that have left, too."""

    request: GenerationRequest
    event: Finished | Failed
    stopped: bool  # ended by a stop string; the engine sees a cancellation
    index: int = 0
    copy: bool = False  # a further answer to the prompt of an earlier one
    in_loop: bool = False  # ended since it repeated itself

    @property
    def will_be_verified(self) -> bool:
        """Return whether the engine will give a verdict on the answer."""
        event = self.event
        sparse = isinstance(event, Finished) and event.report.mode != "full" and event.completion_tokens > 0
        return sparse and self.request.specprefill.verify

    @property
    def reason(self) -> Literal["stop", "length", "abort", "error"]:
        if isinstance(self.event, Failed):
            return "error"
        if self.stopped:
            return "length" if self.in_loop else "stop"
        return "abort" if self.event.reason == "cancelled" else self.event.reason


class Observer(Protocol):
    """A taker of what happens to the answers of one request, on the event loop."""

    def on_event(self, event: Event) -> None:
        """Take an event as it arrives, whether or not its reader is there yet."""

    def on_end(self, result: AnswerResult) -> None:
        """Take an answer's result, before its end is streamed."""

    def on_verdict(self, index: int, verdict: Verdict) -> None:
        """Take the verdict on answer `index`."""


@dataclass(eq=False)
class Generation:
    """The answers to one HTTP request. Its owner must `close` it in every case.

    Args:
        specs: of the prompts.
        copies: answers to each spec, one after the other in the numbers of answers. The engine reads their prompt once.
        _calls: to the running loop.

    Attributes:
        prompts: token ids of each answer's prompt.
        warnings: sentences about parts of the request that are not followed.
        deferred: the number of tools that the prompt leaves out until they are loaded, and that of their tokens.
    """

    _engine: Engine
    specs: InitVar[Sequence[AnswerSpec]]
    copies: int
    _calls: ThreadsafeCalls
    _observer: Observer
    warnings: Sequence[str]
    deferred: tuple[int, int] = (0, 0)
    _closed: bool = False
    _reads: bool = True  # nothing is being sent: the reader takes all events as soon as the event loop lets it
    _events: deque[tuple[int, Event] | None] = field(default_factory=deque)  # None means a pause
    _wanted: asyncio.Future[None] | None = None  # the future of a waiting reader
    _handles: dict[int, RequestHandle] = field(default_factory=dict)
    _deadline: asyncio.TimerHandle | None = None

    def __post_init__(self, specs: Sequence[AnswerSpec]) -> None:
        """Submit all specs, or none; raises as `Engine.submit`."""
        self._loop = asyncio.get_running_loop()
        self._requests = [_with_seed(spec.request, i) for spec in specs for i in range(self.copies)]
        self.prompts: Sequence[TokenIds] = [request.prompt for request in self._requests]
        self._readers = [spec.reader() for spec in specs for _ in range(self.copies)]
        self._open = set(range(len(self._requests)))  # answers without an end
        self._buffer = STREAM_BUFFER * len(self._open)
        try:
            for i in range(len(self._requests)):
                self._start(i)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        """True while an answer is still to come and a client wants it."""
        return bool(self._open) and not self._closed

    def take_ids(self, index: int) -> list[int]:
        """Return the token ids of answer `index` since the last call."""
        return self._readers[index].take_ids()

    def close(self) -> None:
        """Stop all running answers, within one step of the engine."""
        self._closed = True
        self._cancel_deadline()
        for index in self._open & self._handles.keys():
            self._handles[index].cancel()

    def end_at(self, when: float, error: Exception) -> None:
        """Set a deadline by the event loop's clock. Every unfinished answer then ends with `error`."""
        self._deadline = self._loop.call_at(when, self._give_up, error)

    def stop(self, patience: float) -> None:
        """Close on the server's side. Every answer ends now, or after `patience` if the engine is in a long step."""
        self.close()
        end = Failed(EngineClosedError("the server is shutting down"))
        for index in self._open:
            self._loop.call_later(patience, self._put, (index, end))

    async def stream(self) -> AsyncIterator[tuple[int, AnswerDelta]]:
        """Yield every answer's deltas with its number. Each ends with one AnswerDone, also if the engine dies.

        An Idle comes after KEEP_ALIVE_S without a delta other than Progress: most clients see no Progress.
        """
        idle = KeepAliveTimer(self._loop, KEEP_ALIVE_S, self._nothing_came)
        try:
            while self._open:
                item = await self._next()
                for index, delta in self._silence() if item is None else self._read_event(*item):
                    if not isinstance(delta, Progress):
                        idle.postpone()
                    yield index, delta
        finally:
            idle.cancel()
            self._cancel_deadline()

    def _give_up(self, error: Exception) -> None:
        for index in self._open:
            self._put((index, Failed(error)))
        self.close()

    def _put(self, item: tuple[int, Event] | None) -> None:
        self._events.append(item)
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def _next(self) -> tuple[int, Event] | None:
        """Wait for the next event and return it. An asyncio.Queue takes more than twice the time per token."""
        self._reads = True
        while not self._events:
            self._wanted = self._loop.create_future()
            await self._wanted
        self._reads = False
        return self._events.popleft()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _start(self, index: int) -> None:
        request, on_verdict = self._requests[index], partial(self._calls.post, partial(self._take_verdict, index))
        self._handles[index] = self._engine.submit(request, partial(self._on_event, index), on_verdict)

    def _on_event(self, index: int, event: Event) -> None:
        """Handle an event. Called on the MLX thread."""
        if isinstance(event, Finished | Failed):
            self._calls.post(partial(self._report_end, index), event)
        self._calls.post(self._deliver, (index, event))

    def _take_verdict(self, index: int, verdict: Verdict) -> None:
        reader = self._readers[index]
        if reader.over:
            verdict = verdict.of_first(reader.completion_tokens)
        self._observer.on_verdict(index, verdict)

    def _deliver(self, item: tuple[int, Event]) -> None:
        self._observer.on_event(item[1])
        if self._reads or len(self._events) < self._buffer:
            self._put(item)
        elif self._buffer:
            logger.warning("an answer is given up: its client has left %d events unread", self._buffer)
            error, self._buffer = SlowReaderError(self._buffer), 0  # nothing more is kept
            self._events.clear()  # more than the limit, if the event loop was busy: the end must not wait for all of it
            self._give_up(error)

    def _report_end(self, index: int, event: Finished | Failed) -> None:
        reader, copy = self._readers[index], index % self.copies > 0
        stopped = index in self._open and reader.over
        self._observer.on_end(AnswerResult(self._requests[index], event, stopped, index, copy, reader.in_loop))

    def _nothing_came(self) -> None:
        if not self._events:  # else the client is a slow reader
            self._put(None)

    def _silence(self) -> Iterator[tuple[int, AnswerDelta]]:
        yield 0, Idle()
        if not self._events and not self._engine.health().alive:
            for index in list(self._open):
                yield from self._end(index, Failed(EngineClosedError("the engine has stopped")))

    def _read_event(self, index: int, event: Event) -> list[tuple[int, AnswerDelta]]:
        """Turn a failure into the answer's end. The headers are out, so no status can report it."""
        try:
            return self._read(index, event) if index in self._open else []
        except Exception as error:
            logger.exception("an answer could not be read")
            return [(index, self._fail(index, error))]

    def _read(self, index: int, event: Event) -> list[tuple[int, AnswerDelta]]:
        match event:
            case TokenEvent():
                reader = self._readers[index]
                already = reader.over
                deltas: list[tuple[int, AnswerDelta]] = [(index, delta) for delta in reader.push(event)]
                if reader.over and not already:
                    self._handles[index].cancel()
                return deltas
            case Finished() | Failed():
                return list(self._end(index, event))
            case _:
                return [(index, event)]

    def _end(self, index: int, event: Finished | Failed) -> Iterator[tuple[int, AnswerDelta]]:
        report = event.report if isinstance(event, Finished) else self._failed_report(index, event)
        deltas = self._readers[index].finish(event, report)
        self._forget(index, cancel=isinstance(event, Failed))
        for delta in deltas:
            if isinstance(delta, AnswerDone) and delta.finish_reason == "tool_calls":
                self._handles[index].expect_more()
            yield index, delta

    def _fail(self, index: int, error: Exception) -> AnswerDone:
        """End an answer that can't be read any further."""
        self._forget(index, cancel=True)
        return self._readers[index].failed(error, self._failed_report(index, Failed(error)))

    def _forget(self, index: int, cancel: bool) -> None:
        self._open.discard(index)
        if cancel and index in self._handles:
            self._handles[index].cancel()

    def _failed_report(self, index: int, event: Failed) -> PrefillReport:
        failed = f"failed: {event.error}"
        if event.report is not None:
            return replace(event.report, reason=f"{event.report.reason}; {failed}")
        return PrefillReport("full", failed, prompt_tokens=len(self._requests[index].prompt), kept_tokens=0)


def _with_seed(request: GenerationRequest, answer: int) -> GenerationRequest:
    """Return a request whose seed differs between the answers of one request and repeats for the same seed."""
    sampling = request.sampling
    if sampling.seed is None or not answer:
        return request
    return replace(request, sampling=replace(sampling, seed=sampling.seed + answer))
