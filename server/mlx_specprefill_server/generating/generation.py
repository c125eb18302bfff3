"""The bridge between the MLX thread and the event loop: requests go in, pieces of answers come out.

Events arrive through `Deliveries`; everything else here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from mlx_specprefill import (
    Account,
    CachedTokens,
    Constraint,
    EngineClosedError,
    EngineError,
    EngineStats,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Inspection,
    Logprob,
    Progress,
    PromptLogprobs,
    SpecPrefillError,
    Stage,
    TokenEvent,
)

from .deliveries import Deliveries
from .deltas import NO_STOPS, AnswerText, Delta, Stops
from .vocabulary import Vocabulary

__all__ = [
    "Done",
    "Ended",
    "EngineLike",
    "Generation",
    "Idle",
    "Job",
    "Piece",
    "PromptScores",
    "SlowReaderError",
    "Working",
]

logger = logging.getLogger(__name__)


class SlowReaderError(EngineError):
    """Nobody takes what the engine makes."""

    def __init__(self) -> None:
        super().__init__("The client has read too slowly: the answer was given up (MLX_SPECPREFILL_STREAM_BUFFER).")


class Handle(Protocol):
    def cancel(self) -> None: ...
    def expect_more(self) -> None: ...


class Health(Protocol):
    @property
    def alive(self) -> bool: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def queued(self) -> int: ...


class EngineLike(Protocol):
    """What the server needs of the engine; `pair` is the loaded pair with tokenizer, context_length and names."""

    @property
    def pair(self) -> Any: ...
    def compile(self, constraint: Constraint) -> None: ...
    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> Handle: ...
    def submit_inspection(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        on_end: Callable[[Inspection | Exception], None],
    ) -> Handle: ...
    def cached(self, owner: str | None = None) -> tuple[CachedTokens, ...]: ...
    def drop_cached(self, name: str | None = None, owner: str | None = None) -> bool: ...
    def health(self) -> Health: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to be made: the engine's request, and what happens to its text.

    Attributes:
        shown_ids: ids that end the answer and are part of its text all the same.
        with_tokens: the tokens are wanted beside their text, also without logprobs.
        follows: None, or the number of an earlier job with the same prompt: this one starts when that one's prompt
            has been read, and finds it in the engine's cache.
    """

    request: GenerationRequest
    stops: Stops = NO_STOPS
    shown_ids: frozenset[int] = frozenset()
    with_tokens: bool = False
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The prompt's own logprobs, for echo."""

    index: int
    entries: tuple[tuple[Logprob, tuple[Logprob, ...]], ...]


@dataclass(frozen=True, slots=True)
class Working:
    """Tokens done in a stage before the first token."""

    index: int
    stage: Stage
    done: int
    total: int
    cached: int | None = None  # prompt tokens that need not be read again; None: not known yet


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing to show for a while: time for a keep-alive."""


@dataclass(frozen=True, slots=True)
class Done:
    """The end of answer `index`. With an `error` the answer is incomplete, and `finish_reason` is "length"."""

    index: int
    finish_reason: Literal["stop", "length"]
    completion_tokens: int
    account: Account
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one answer in the engine, told to those who count, whoever still reads the answer."""

    request: GenerationRequest
    event: Finished | Failed
    stopped: bool  # by a stop string, which the engine sees as a cancellation
    copy: bool = False  # a further answer to a prompt that was read for an earlier one

    @property
    def reason(self) -> Literal["stop", "length", "abort", "error"]:
        if isinstance(self.event, Failed):
            return "error"
        if self.stopped:
            return "stop"
        return "abort" if self.event.reason == "cancelled" else self.event.reason


OnEnd = Callable[[Ended], None]

Piece = Delta | PromptScores | Working | Idle | Done


class Generation:
    """The answers to one HTTP request. Whoever holds it must `close` it, whatever happens."""

    def __init__(
        self,
        engine: EngineLike,
        vocabulary: Vocabulary,
        jobs: Sequence[Job],
        deliveries: Deliveries,
        on_end: OnEnd = lambda _: None,
        buffer: int = 1 << 20,
    ) -> None:
        """Submits all jobs, or none. `on_end` hears of every answer's end before its reader does.

        Args:
            deliveries: to the running loop.
            buffer: events that may wait for a reader; beyond it the answers are given up.

        Raises:
            InvalidRequestError, EngineClosedError: as `Engine.submit`.
        """
        self._engine = engine
        self._jobs = jobs
        self._on_end = on_end
        self._deliveries = deliveries
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()  # None: nothing came for a while
        self._handles: dict[int, Handle] = {}
        self._buffer = buffer
        self._timers: list[asyncio.TimerHandle] = []
        self._waiting: asyncio.TimerHandle | None = None  # None: begun, or it may wait for ever
        self._later = {i: job.follows for i, job in enumerate(jobs) if job.follows is not None}
        self._answers = {i: _answer(i, job, vocabulary) for i, job in enumerate(jobs)}
        try:
            for i in range(len(jobs)):
                if i not in self._later:
                    self._start(i)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops whatever is still being made, within one step of the engine."""
        self._cancel_timers()
        for index, handle in self._handles.items():
            if index in self._answers:
                handle.cancel()
        for index in self._later:
            self._events.put_nowait((index, Failed(EngineClosedError("the request was given up"))))
        self._later.clear()

    def halt(self, index: int) -> None:
        """Answer `index` is long enough: its end will be a "stop", whatever the model still wants to say."""
        if index in self._answers:
            self._answers[index].halt()
            self._handles[index].cancel()

    def expect_more(self, index: int) -> None:
        """Answer `index` called a tool, so the conversation goes on."""
        self._handles[index].expect_more()

    def lose(self, index: int, error: Exception) -> Done:
        """Gives answer `index` up; there must have been no Done of it."""
        return self._lost(index, error)

    def end_at(self, when: float, error: Exception) -> None:
        """Gives up by the event loop's clock: every answer that is not over then ends with `error`."""
        self._timers.append(self._loop.call_at(when, self._give_up, error))

    def begin_within(self, seconds: float, error: Exception) -> None:
        """Gives up if the engine has not begun any of the answers by then."""
        self._waiting = self._loop.call_later(seconds, self._give_up, error)

    def stop(self, patience: float) -> None:
        """Closes on the server's side: every answer ends now, or after `patience` if the engine is in a long step."""
        self.close()
        end = Failed(EngineClosedError("the server is shutting down"))
        for index in self._answers:
            self._loop.call_later(patience, self._events.put_nowait, (index, end))

    def _give_up(self, error: Exception) -> None:
        for index in self._answers:  # first: `close` has another reason for those that wait for one of these
            self._events.put_nowait((index, Failed(error)))
        self.close()

    def _cancel_timers(self) -> None:
        for timer in (*self._timers, self._waiting):
            if timer is not None:
                timer.cancel()

    async def pieces(self, idle_after: float) -> AsyncIterator[Piece]:
        """Every answer's pieces as they come; each answer ends with exactly one Done, also when the engine dies."""
        alarm = _Alarm(self._loop, idle_after, self._nothing_came)
        try:
            while self._answers:
                item = await self._events.get()
                if item is None or not isinstance(item[1], Progress):
                    alarm.postpone()
                for piece in self._silence() if item is None else self._guarded(*item):
                    yield piece
        finally:
            alarm.cancel()
            self._cancel_timers()

    def _start(self, index: int) -> None:
        self._handles[index] = self._engine.submit(self._jobs[index].request, partial(self._deliver, index))

    def _start_followers(self, leader: int) -> Iterator[Piece]:
        """The prompt of `leader` has been read, or will not be."""
        followers = [index for index, follows in self._later.items() if follows == leader]
        for index in followers:
            del self._later[index]
            try:
                self._start(index)
            except SpecPrefillError as error:
                yield self._lost(index, error)

    def _deliver(self, index: int, event: Event) -> None:
        """Called on the MLX thread."""
        if isinstance(event, Finished | Failed):
            self._deliveries.post(partial(self._tell, index), event)
        self._deliveries.post(self._arrived, (index, event))

    def _arrived(self, item: tuple[int, Event]) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._events.qsize() < self._buffer:
            self._events.put_nowait(item)
        elif self._buffer:
            logger.warning("an answer is given up: its client has left %d events unread", self._buffer)
            self._buffer = 0  # nothing more is kept
            self._give_up(SlowReaderError())

    def _tell(self, index: int, event: Finished | Failed) -> None:
        answer = self._answers.get(index)
        job = self._jobs[index]
        self._on_end(Ended(job.request, event, answer is not None and answer.stopped, copy=job.follows is not None))

    def _nothing_came(self) -> None:
        if self._events.empty():  # else the client is slow to take what came
            self._events.put_nowait(None)

    def _silence(self) -> Iterator[Piece]:
        yield Idle()
        if self._events.empty() and not self._engine.health().alive:
            for index in list(self._answers):
                yield self._lost(index, EngineClosedError("the engine has stopped"))

    def _guarded(self, index: int, event: Event) -> list[Piece]:
        """The error ring of a stream: headers are out, so a failure must become the answer's end."""
        try:
            return list(self._pieces(index, event)) if index in self._answers else []
        except Exception as error:
            logger.exception("the text of an answer could not be made")
            return [self._lost(index, error)]

    def _pieces(self, index: int, event: Event) -> Iterator[Piece]:
        if self._later and isinstance(event, TokenEvent | Finished | Failed):
            yield from self._start_followers(index)
        match event:
            case Progress():
                yield Working(index, event.stage, event.done, event.total, event.cached)
            case PromptLogprobs():
                yield PromptScores(index, event.entries)
            case TokenEvent():
                yield from self._token(index, event)
            case Finished():
                yield from self._finished(index, event)
            case Failed():
                yield from self._flush(index)
                yield self._lost(index, event.error, event.account)

    def _token(self, index: int, event: TokenEvent) -> Iterator[Piece]:
        answer = self._answers[index]
        already = answer.stopped
        delta = answer.push(event)
        if answer.stopped and not already:
            self._handles[index].cancel()
        if delta.text or delta.tokens:
            yield delta

    def _finished(self, index: int, event: Finished) -> Iterator[Piece]:
        yield from self._flush(index)
        answer = self._answers.pop(index)
        if answer.stopped or event.reason == "stop":
            yield Done(index, "stop", answer.completion_tokens, event.account)
            return
        stopped = EngineClosedError("the server is shutting down") if event.reason == "cancelled" else None
        yield Done(index, "length", answer.completion_tokens, event.account, stopped)

    def _flush(self, index: int) -> Iterator[Delta]:
        """Text that was held back and will not become anything else."""
        delta = self._answers[index].finish()
        if delta.text or delta.tokens:
            yield delta

    def _lost(self, index: int, error: Exception, account: Account | None = None) -> Done:
        answer = self._answers.pop(index)
        if index in self._handles:
            self._handles[index].cancel()
        failed = f"failed: {error}"
        if account is None:
            account = Account("full", failed, prompt_tokens=len(self._jobs[index].request.prompt), kept_tokens=0)
        else:
            account = replace(account, reason=f"{account.reason}; {failed}")
        return Done(index, "length", answer.completion_tokens, account, error)


class _Alarm:
    """Rings once nothing has postponed it for `after` seconds, and then again. Postponing costs no timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, after: float, ring: Callable[[], None]) -> None:
        self._loop, self._after, self._ring = loop, after, ring
        self.postpone()
        self._timer = loop.call_at(self._due, self._check)

    def postpone(self) -> None:
        self._due = self._loop.time() + self._after

    def cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self._loop.time() >= self._due:
            self.postpone()
            self._ring()
        self._timer = self._loop.call_at(self._due, self._check)


def _answer(index: int, job: Job, vocabulary: Vocabulary) -> AnswerText:
    request = job.request
    return AnswerText(
        index,
        vocabulary.decode,
        request.prompt,
        job.stops,
        request.stop_token_ids - job.shown_ids,
        with_tokens=job.with_tokens or request.logprobs is not None,
    )
