"""The engine's inbox, and its loop on the MLX thread, which creates and frees every array.

Each tick is one decode step of all running answers, then one slice of one prefill, or short ones that take no longer
together (`scheduler.py` says whose).
An error of one request never ends the loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import mlx.core as mx

from ..config import EngineConfig
from ..errors import DeviceError, DeviceErrorKind, EngineClosedError, RequestCancelled, device_error
from ..request import Event, Finished, FinishReason, TokenEvent, concat_tokens
from .caches import EngineCaches, Erasure
from .decode_batch import Rows
from .densify import BackgroundPrefill, Battery
from .memory import ANSWER_TOKENS, Memory
from .scheduler import ChunkSizer, CostModel, Scheduler
from .sequence import AnswerJob, Job, RequestHandle, Sequence, log_failure, strip_traceback

log = logging.getLogger(__name__)

_MOST = 3  # errors without a token between them after which the device is given up


class DeviceErrors:
    """Acts on device errors, so that the next request can succeed. MLX thread only, except `fatal`.

    MLX reports them as RuntimeErrors with a message only.

    Args:
        halve: halves the longest prefill chunk; returns its tokens.

    Attributes:
        fatal: why the device is unusable until a restart; None while it works.
    """

    def __init__(self, caches: EngineCaches, memory: Memory, halve: Callable[[], int]) -> None:
        self._caches = caches
        self._memory = memory
        self._halve = halve
        self._latest: Exception | None = None
        self._advice = ""
        self._in_a_row = 0
        self.fatal: str | None = None

    def explain(self, error: Exception) -> Exception:
        """Return the error for the client of a failed request."""
        if device_error(error) is None:
            return error
        self.note(error)
        return DeviceError(self.fatal or f"the device failed on this request: {error}. {self._advice}")

    def note(self, error: Exception) -> None:
        """Handle an error once, even if several rows fail with it. Ignores errors that are not the device's."""
        kind = device_error(error)
        if kind is None or error is self._latest:
            return
        self._latest = strip_traceback(error)
        self._in_a_row += 1
        if kind == "refused" or self._in_a_row >= _MOST:
            self.fatal = f"the device takes no more work, this server has to be started again: {error}"
            log.critical(self.fatal)
            return
        self._advice = self._act(kind)
        log.error("the device failed: %s. %s", error, self._advice)

    def note_token(self) -> None:
        """Note that a token was computed."""
        self._in_a_row = 0

    def _act(self, kind: DeviceErrorKind) -> str:
        """Handle one kind of error; return what was done and what the user can do."""
        if kind == "memory":
            self._make_room()
            return (
                "Cached prompts were dropped and less memory is planned with. Send it again or shorten it; if it fails "
                "again, close other programs, or start the server with a lower --memory-limit or --prefill-step."
            )
        if kind == "timeout":
            return f"Prompts are read {self._halve()} tokens at a time at most from now on. Send it again."
        return "Send it again."

    def _make_room(self) -> None:
        try:
            self._caches.budget.shrink(self._caches.nbytes)
        except RuntimeError:
            log.exception("cached prompts could not be dropped")  # what goes to disk is copied first
        mx.clear_cache()
        self._memory.lower_limit()


IDLE_BEAT_S = 0.5
_SAVE_BEAT_S = 0.01  # while there is nothing else to do than to save prefixes
_QUIET_S = 1.0  # without requests before background work begins: an agent's next turn often comes at once
_LOOK_EVERY_S = 0.5  # at the memory; not above IDLE_BEAT_S, so that it is looked at while nothing comes
_NOTHING_S = 2e-3  # a step of a prefill that takes no longer, such as its planning, is no chunk
_TICK_SHARE = 0.5  # of `target_itl_ms`: within it another chunk may begin

_METER_S = 5
_SIGNAL_S = 0.5


class Meter:
    """Recent rate of an event per second. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque(maxlen=_METER_S + 1)  # (second, count)

    def add(self, count: int) -> None:
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1] = (now, self._seconds[-1][1] + count)
        else:
            self._seconds.append((now, count))

    def per_second(self) -> float:
        """Return the rate over the last whole seconds; 0 if nothing happened."""
        now = int(self._clock())
        return sum(count for second, count in tuple(self._seconds) if now - _METER_S <= second < now) / _METER_S


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call on the MLX thread.

    Attributes:
        method, arguments: what other ranks have to call on their loops, if anything.
    """

    run: Callable[[], None]
    method: str | None = None
    arguments: tuple[Any, ...] = ()


class Results(queue.SimpleQueue[T | Exception]):
    """One result, passed from the MLX thread to a waiting caller."""

    def fill(self, call: Callable[[], T]) -> None:
        """Store the call's result or exception. The exception belongs to the caller, not to the thread."""
        try:
            self.put(call())
        except Exception as error:  # noqa: BLE001
            self.put(strip_traceback(error))

    def wait(self) -> T:
        """Return the result, or raise the exception."""
        while True:
            with suppress(queue.Empty):
                # A signal that comes just before the wait does not end it; Ctrl-C takes effect after it.
                result = self.get(timeout=_SIGNAL_S)
                break
        if isinstance(result, Exception):
            raise result
        return result


class Inbox:
    """Jobs and calls in order of arrival, accepted between `open` and `close`.

    Args:
        scheduler: gets every job that the MLX thread takes.
        max_queue: jobs that may wait, in the inbox and the scheduler together.
        wake: wakes the MLX thread after a post or a close.
    """

    def __init__(self, scheduler: Scheduler, max_queue: int, wake: Callable[[], None] = lambda: None) -> None:
        self._scheduler = scheduler
        self._max_queue = max_queue
        self._wake = wake
        self._posted: queue.SimpleQueue[Job | Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uids = count(1)
        self._unread = 0  # jobs
        self._open = False
        self._why = "the engine is not running"

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def waiting(self) -> int:
        """Return the number of jobs that have not started."""
        return self._scheduler.waiting + self._unread

    def __bool__(self) -> bool:
        """Return whether a job or call is waiting."""
        return not self._posted.empty()

    def open(self) -> None:
        self._open = True

    def close(self, why: str | None = None) -> bool:
        """Close the inbox and wake the MLX thread; return False if it was closed already.

        Args:
            why: the message of the error that later callers get.
        """
        with self._lock:
            was_open, self._open = self._open, False
            self._why = why or self._why
        if was_open:
            self._posted.put(None)
            self._wake()
        return was_open

    def next_uid(self) -> int:
        return next(self._uids)

    def post(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineClosedError: the inbox is closed, or `max_queue` jobs wait already.
        """
        with self._lock:
            self._check_open()
            waiting = self.waiting
            if waiting >= self._max_queue:
                raise EngineClosedError(f"{waiting} requests are waiting already")
            self._unread += 1
            self._posted.put(job)  # before it can be closed: the loop reads no further
        self._wake()

    def call(self, call: Callable[[], T], method: str | None = None, *arguments: Any) -> T:
        """Call something on the MLX thread, between two chunks, and return its result.

        Args:
            method, arguments: see `Call`.

        Raises:
            EngineClosedError: the inbox is closed.
        """
        done = Results[T]()
        with self._lock:
            self._check_open()
            self._posted.put(Call(partial(done.fill, call), method, arguments))
        self._wake()
        return done.wait()

    def take(self) -> Job | Call | None:
        """Return the next job or call, on the MLX thread; None if there is none or the inbox was closed."""
        try:
            posted = self._posted.get_nowait()
        except queue.Empty:
            return None
        if isinstance(posted, Job):
            with self._lock:
                self._scheduler.add(posted.uid)
                self._unread -= 1
        return posted

    def drain(self) -> list[Job]:
        """Return the jobs that were not taken from a closed inbox. May be called from any thread."""
        jobs = []
        while not self._posted.empty():
            with suppress(queue.Empty):
                posted = self._posted.get_nowait()
                if isinstance(posted, Job):
                    jobs.append(posted)
        return jobs

    def _check_open(self) -> None:
        if not self._open:
            raise EngineClosedError(self._why)


@dataclass(eq=False)
class EngineCore:
    """Takes jobs out of the inbox and brings each to its end.

    Attributes:
        jobs: in work or waiting, by uid.
        ready, ended: set once it has measured what a sequence costs, and once it does nothing more.
        stuck: requests wait, and none runs, for memory that other engines hold.
        beat: when it last did something, by the monotonic clock.
        meter: of generated tokens.
    """

    _config: EngineConfig
    _inbox: Inbox
    _scheduler: Scheduler
    _memory: Memory
    _caches: EngineCaches
    _chunks: ChunkSizer
    _costs: CostModel
    _rows: Rows
    _densifier: BackgroundPrefill
    _device_errors: DeviceErrors

    def __post_init__(self) -> None:
        self._battery = Battery()
        self._last_end = 0.0  # of a request, by the monotonic clock
        self._next_look = 0.0  # at the memory, by the same
        self._returned = False  # what MLX keeps of the memory that was freed, since the last work
        self.jobs = self._memory.jobs
        self._decoding: dict[int, AnswerJob] = {}  # of those, the ones with a row
        self.ready, self.ended = threading.Event(), threading.Event()
        self.stuck = False
        self.beat = time.monotonic()
        self.meter = Meter()
        self._memory.rows_bytes, self._memory.stop_background = lambda: self._rows.nbytes, self._stop_background
        self._memory.rows_padding, self._rows.room = lambda: self._rows.padding, self._memory.padding_room

    def begin(self) -> None:
        """Measure what a sequence costs."""
        self._memory.measure()
        self._costs.load()
        self.ready.set()

    def step(self, background: bool = True, elsewhere: bool = False) -> None:
        """Take what has come, and do one tick. An error that belongs to no single request ends all that run.

        Args:
            background: whether work that no request waits for may be begun.
            elsewhere: answers of other engines wait for the tick.
        """
        self.beat = time.monotonic()
        self._chunks.elsewhere = elsewhere
        self._read_inbox()
        if not self._is_accepting():
            return
        try:
            self._tick(background)
        except Exception as error:
            log.exception("the engine starts over")
            self._start_over(error)
        if self.fatal is not None and self.jobs:
            self._start_over(DeviceError(self.fatal))

    def end(self) -> None:
        """Take no more requests, cancel those that run or wait, and drop the caches."""
        self._inbox.close()
        self._cancel_all()
        self._densifier.close()
        self._caches.close()
        self._costs.store()
        self._memory.close()
        self.ended.set()
        self.ready.set()

    # --- what is kept ------------------------------------------------------------------------------------------------

    def drop(self, name: str, owner: str | None) -> bool:
        """Drop one entry of the caches; see `EngineCaches.drop`."""
        return self._caches.drop(name, owner)

    def forget(self, owner: str | None, at: float) -> None:
        """Drop an owner's prompts or everybody's, also those that wait for idle time; see `EngineCaches.forget`."""
        self._caches.forget(owner, at)
        for job in list(self.jobs.values()):
            if job.rereads is not None and not self._caches.keeps(job.rereads):
                job.handle.cancel()
                self._cancel(job)
        self._densifier.forget()

    def erasure(self) -> Erasure:
        """Return whether what was dropped has left the disk."""
        return self._caches.erasure()

    # -----------------------------------------------------------------------------------------------------------------

    def _cancel_all(self) -> None:
        self._read_inbox()
        for job in list(self.jobs.values()):
            self._cancel(job)

    def lose(self, error: Exception) -> None:
        """Fail everything that runs, from any thread: the MLX thread may wait for ever."""
        for job in list(self.jobs.values()):
            job.lose(error)

    @property
    def fatal(self) -> str | None:
        """Return why the device computes nothing any more, once it is so."""
        return self._device_errors.fatal

    @property
    def has_ended(self) -> bool:
        """Return whether nothing more will come."""
        return not (self._inbox.is_open or self._inbox)

    @property
    def busy(self) -> bool:
        """Return whether requests have something to gain by a tick."""
        scheduler = self._scheduler
        return bool(self._inbox or scheduler.running or (scheduler.waiting and not self.stuck))

    @property
    def answering(self) -> bool:
        return bool(self._scheduler.decoding)

    def _read_inbox(self) -> None:
        while (posted := self._take()) is not None:
            self._returned = False
            if isinstance(posted, Call):
                posted.run()
                continue
            self.jobs[posted.uid] = posted
            if isinstance(posted, AnswerJob):
                request, selection_key = posted.sequence.request, posted.sequence.plan.selection_key
                cached = self._caches.covers(request.prompt[: request.usable_prefix], request.label, selection_key)
                self._scheduler.add(posted.uid, len(request.prompt) - cached)

    def _take(self) -> Job | Call | None:
        return self._inbox.take()

    def _is_accepting(self) -> bool:
        return self._inbox.is_open

    @property
    def rest_s(self) -> float:
        """Return the seconds until the next work without a new request."""
        if self.has_ended or not self._scheduler.idle:
            return 0.0
        return min(self._idle_s, _SAVE_BEAT_S) if self._caches.has_unsaved else self._idle_s

    @property
    def _idle_s(self) -> float:
        """Seconds until background work begins, or until the next beat."""
        quiet = time.monotonic() - self._last_end
        left = self._quiet_s - quiet if self._densifier.turns else IDLE_BEAT_S
        has_power = left > 0 or self._config.policy.on_battery or not self._battery.is_in_use
        return min(left, IDLE_BEAT_S) if has_power else IDLE_BEAT_S

    @property
    def _quiet_s(self) -> float:
        """Seconds without requests before background work begins: none for the draft, which the next turn waits for."""
        return 0.0 if self._densifier.drafts_first else _QUIET_S

    def _start_over(self, error: Exception) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, error)
        self._rows.clear()

    def _tick(self, background: bool) -> None:
        for uid in self._cancelled_ids():
            self._cancel(self.jobs[uid])
        self._admit()
        self._decode()
        if background:
            self._start_background()
        self._prefill()
        self._caches.save_some()
        self._look_at_memory()

    def _clock(self) -> float:
        return time.perf_counter()

    def _is_quiet(self) -> bool:
        """Return whether there has been no request for long enough to begin background work."""
        return not self._scheduler.idle or self._idle_s <= 0

    def _next_uid(self) -> int:
        return self._inbox.next_uid()

    def _cancelled_ids(self) -> list[int]:
        return [uid for uid, job in self.jobs.items() if job.handle.cancelled]

    def _look_at_memory(self) -> None:
        """Compare what MLX holds with what is accounted for; return freed memory to the system when idle."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        self._memory.balance()
        if not self._returned and not self.jobs and now - self._last_end >= _QUIET_S:
            mx.clear_cache()  # freed memory goes back to the system
            self._costs.store()
            self._returned = True

    # --- from waiting to the answer ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        passing = False  # no memory for the first in line
        self.stuck = False
        while (uid := self._scheduler.next_waiting(passing)) is not None:
            job = self.jobs[uid]
            if not self._memory.fits(job.need):
                self._stop_background()
            if self._memory.reserve(job.uid, job.need):
                self._scheduler.admit(uid)
                self._rows.plan_anew()
                if isinstance(job, AnswerJob):
                    job.sequence.started = time.perf_counter()
            elif self._scheduler.running == 0 and self._memory.may_come(uid, job.need):
                self.stuck = True
                return
            elif self._scheduler.running == 0:
                # Nothing will free memory any more: what the prediction counts is not in our hands.
                self._fail(job, EngineClosedError("not enough memory for this request now"))
            elif passing:
                return
            else:
                passing = True

    def _start_background(self) -> None:
        """With nothing else to do, make the prompt of a sparse turn dense in the exact cache."""
        if not self._densifier.turns or self._scheduler.running or self._scheduler.waiting:
            return
        if not self._is_quiet():
            return
        job = self._densifier.job(self._next_uid())
        if job is not None:
            self._returned = False
            self.jobs[job.uid] = job
            self._scheduler.add_background(job.uid)

    def _stop_background(self) -> None:
        """Its memory goes to a request; it begins again later, with what it has stored."""
        for job in [job for job in self.jobs.values() if job.background]:
            job.handle.cancel()
            self._cancel(job)

    def _prefill(self) -> None:
        """Run one chunk, or several that begin within half of `target_itl_ms`.

        So short prompts that came at once join the next decode step at once. Between chunks newcomers are let in.
        """
        begun, job = self._clock(), self._next_prefill()
        while job is not None:
            self._run_step(job)
            spent = self._clock() - begun
            if self._cancelled_ids():
                return
            self._read_inbox()
            self._admit()
            job = self._next_prefill()
            if spent > max(_NOTHING_S, _TICK_SHARE * self._config.target_itl_ms / 1e3):
                return

    def _next_prefill(self) -> Job | None:
        uid = self._scheduler.pick()
        return None if uid is None else self.jobs[uid]

    def _run_step(self, job: Job) -> None:
        begun = self._clock()
        self._chunks.begin(job)
        try:
            event = job.advance()
            if event is None:
                self._finish_prefill(job)
        except Exception as error:  # noqa: BLE001 - one job must not end the others
            log_failure(log, "prefill failed", error)
            self._fail(job, error)
            return
        job.step_s = self._clock() - begun
        if event is not None:
            self._chunks.observe(job, event)
            self._emit(job, event)

    def _finish_prefill(self, job: Job) -> None:
        """After the last prefill chunk, begin to decode; report the result of a job without an answer."""
        if not isinstance(job, AnswerJob):
            self._forget(job)
            job.on_end(job.result)
            return
        logits, job.result = job.result, None
        try:
            self._answer(job, logits)
        finally:
            job.sequence.store()

    def _answer(self, job: AnswerJob, logits: mx.array) -> None:
        """Begin to decode. The first token goes out at once."""
        sequence = job.sequence
        if sequence.request.max_tokens == 0:
            self._end(job, Finished("length", 0, sequence.report()))
            return
        sequence.stage = "decode"
        self._scheduler.to_decode(job.uid)
        self._decoding[job.uid] = job
        self._report_token(job, self._rows.add(sequence, logits))

    def _decode(self) -> None:
        for uid, outcome in self._rows.step():
            if isinstance(outcome, Exception):
                self._fail(self._decoding[uid], outcome)
            else:
                self._report_token(self._decoding[uid], outcome)
        if self._rows.padding:
            self._memory.evict_for_rows()

    def _report_token(self, job: AnswerJob, event: TokenEvent) -> None:
        sequence, most = job.sequence, job.sequence.request.max_tokens
        self.meter.add(1)
        self._device_errors.note_token()
        sequence.record(event)
        self._emit(job, event)
        if event.token in sequence.request.stop_token_ids:
            self._finish(job, "stop")
        elif (done := len(sequence.tokens)) >= most:
            self._finish(job, "length")
        elif done % ANSWER_TOKENS == 0:
            self._memory.extend(job.uid, min(most - done, ANSWER_TOKENS))

    # --- how jobs end ------------------------------------------------------------------------------------------------

    def _finish(self, job: AnswerJob, reason: FinishReason) -> None:
        """End a decoding row; what its cache holds may serve the next turn."""
        sequence = job.sequence
        sequence.store()
        cache, tokens = self._rows.remove(job.uid)
        self._memory.settle(job, cache)  # so that there is more room for what is kept
        if sequence.shift == 0 and self._config.kv_bits is None:
            sequence.keep(self._caches, concat_tokens(sequence.request.prompt, tokens), cache)
        self._end(job, Finished(reason, len(sequence.tokens), sequence.report()))
        if self._caches.enabled:
            self._follow(sequence, job.handle)

    def _follow(self, sequence: Sequence, handle: RequestHandle) -> None:
        """Queue what is left to read. Some turns are read in line with requests, without waiting for idle time."""
        turn = self._densifier.follow(sequence, handle)
        if turn is not None:
            uid = self._next_uid()
            self.jobs[uid] = self._densifier.make_job(turn, uid)
            self._scheduler.add(uid)

    def _cancel(self, job: Job) -> None:
        if job.uid in self._decoding:
            self._finish(self._decoding[job.uid], "cancelled")
            return
        job.stop()
        if isinstance(job, AnswerJob):
            job.sequence.store()
            self._end(job, Finished("cancelled", 0, job.sequence.report()))
        else:
            self._forget(job)
            job.on_end(RequestCancelled() if job.handle.cancelled else EngineClosedError("the engine was closed"))

    def _fail(self, job: Job, error: Exception) -> None:
        self._forget(job)
        job.fail(self._device_errors.explain(strip_traceback(error)))

    def _end(self, job: Job, event: Event) -> None:
        self._forget(job)
        self._emit(job, event)

    def _forget(self, job: Job) -> None:
        if not job.background:
            self._last_end = time.monotonic()
        self.jobs.pop(job.uid, None)
        self._decoding.pop(job.uid, None)
        self._chunks.end(job)
        self._scheduler.remove(job.uid)
        self._memory.release(job.uid)

    def _emit(self, job: Job, event: Event) -> None:
        self.beat = time.monotonic()
        job.emit(event)
