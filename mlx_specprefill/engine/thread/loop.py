"""The engine's loop on the MLX thread: what a step does, who waits for memory, when idle work begins, how jobs end.

Each step is one decode step of all running answers, then prefill chunks: one, or short ones that take no longer
together. An error of one request never ends the loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import mlx.core as mx

from ...cache.prefix.nodes import common_length
from ...config import EngineConfig
from ...errors import DeviceError, EngineClosedError, RequestCancelled
from ...events import Event, Finished, FinishReason, TokenEvent
from ...request import concat_tokens
from ..decoding.answers import Rows
from ..memory.reservations import ANSWER_TOKENS, Memory
from ..prefixes.caches import EngineCaches, Erasure
from ..reading.chunks import ChunkSizer
from ..reading.costs import CostModel
from ..requests.active_request import ActiveRequest
from ..requests.failures import log_failure, strip_traceback
from ..requests.job import AnswerJob, Job
from ..requests.scheduler import Scheduler
from .background import BackgroundPrefill
from .battery import Battery
from .device_errors import DeviceErrors
from .inbox import Call, Inbox
from .meter import Meter

T = TypeVar("T")
log = logging.getLogger(__name__)
IDLE_BEAT_S = 0.5
_SAVE_BEAT_S = 0.01  # while there is nothing else to do than to save prefixes
_QUIET_S = 1.0  # without requests before background work begins: an agent's next turn often comes at once
_UNUSED_S = 20.0  # without requests before MLX gives freed memory back: an agent's next turn would allocate it anew
_LOOK_EVERY_S = 0.5  # at the memory; not above IDLE_BEAT_S, so that it is looked at while nothing comes
_NOTHING_S = 2e-3  # a step of a prefill that takes no longer, such as its planning, is no chunk
_TICK_SHARE = 0.5  # of `target_itl_ms`: within it another chunk may begin


@dataclass(eq=False)
class EngineCore:
    """Takes jobs out of the inbox and brings each to its end.

    Attributes:
        jobs: in work or waiting, by uid.
        ready, ended: set once it has measured the cost of a request, and once it has ended.
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
        self._memory.stop_background = self._stop_background

    def begin(self) -> None:
        """Measure what a request costs."""
        self._memory.measure()
        self._chunks.largest = min(self._chunks.largest, self._memory.step)
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
                self._scheduler.add(posted.uid, len(posted.active.request.prompt) - self._cached(posted.active))

    def _cached(self, active: ActiveRequest) -> int:
        """Return the number of a prompt's leading tokens that are cached now."""
        request, key = active.request, active.plan.selection_key
        known = request.prompt[: request.usable_prefix]
        return self._caches.covers(known, request.label, None if key is None else key.unforced)

    def _serves(self, other: Job, job: Job) -> bool:
        """Return whether a prefill reads what a waiting prompt begins with and is not cached, and less than that beside
        it.
        """
        if not (isinstance(job, AnswerJob) and isinstance(other, AnswerJob)):
            return False
        request, reads = job.active.request, other.active.request
        if request.label != reads.label or not self._caches.keeps(reads):
            return False
        if request.prompt_logprobs is not None or reads.prompt_logprobs is not None:
            return False
        shared = common_length(request.prompt[:-1], reads.prompt)
        if other.active.plan.mode == "sparse" and job.active.plan.selection_key is None:
            shared = min(shared, reads.system_prefix_len)  # behind that the prefix is not dense
        more = shared - (reads.prompt.size - shared)
        return more > 0 and more > self._cached(job.active)  # the cache is looked at only where prompts are alike

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
        left = self._quiet_s - quiet if self._densifier.has_work else IDLE_BEAT_S
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
        for uid in self._decide("cancelled", self._cancelled_ids):
            self._cancel(self.jobs[uid])
        self._admit()
        self._decode()
        if background:
            self._start_background()
        self._prefill()
        self._caches.save_some()
        self._look_at_memory()

    def _decide(self, what: str, read: Callable[[], T]) -> T:
        """Return what depends on a clock, a client or chance. Of several ranks, rank 0 decides (`ranked`)."""
        return read()

    def _is_quiet(self) -> bool:
        """Return whether there has been no request for long enough to begin background work."""
        return not self._scheduler.idle or self._idle_s <= 0

    def _cancelled_ids(self) -> list[int]:
        return [uid for uid, job in self.jobs.items() if job.handle.cancelled]

    def _look_at_memory(self) -> None:
        """Store learnt costs, and return freed memory to the system, after some time without work."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        idle_s = 0.0 if self.jobs else now - self._last_end
        if idle_s >= _QUIET_S:
            self._costs.store()
        if not self._returned and idle_s >= _UNUSED_S:
            mx.clear_cache()  # freed memory goes back to the system
            self._returned = True

    # --- from waiting to the answer ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        passing = False  # no memory for the first in line
        self.stuck = False
        while (uid := self._scheduler.next_waiting(passing)) is not None:
            job = self.jobs[uid]
            reader = next((one for one in self._scheduler.prefilling if self._serves(self.jobs[one], job)), None)
            if reader is not None:
                self._scheduler.hold(uid, reader)
                continue
            if not self._memory.fits(job.need):
                self._stop_background()
            if self._memory.reserve(job.uid, job.need):
                self._scheduler.admit(uid)
                if self._densifier.is_drafting:
                    self._cancel_background()  # what the draft has read so far serves this request
                if isinstance(job, AnswerJob):
                    job.active.times.started = time.perf_counter()
            elif self._scheduler.running == 0 and self._memory.can_be_freed(uid, job.need):
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
        """With nothing else to do, make the prompt of a sparse turn dense in the exact cache, or fit estimates."""
        if not self._densifier.has_work or self._scheduler.running or self._scheduler.waiting:
            return
        if not self._decide("quiet", self._is_quiet):
            return
        job = self._densifier.job(self._decide("uid", self._inbox.next_uid))
        if job is not None:
            self._returned = False
            self.jobs[job.uid] = job
            self._scheduler.add_background(job.uid)

    def _stop_background(self) -> None:
        """Give the memory of background work to a request. The work begins again later, with what it has stored."""
        self._cancel_background()
        self._densifier.drop_fit()

    def _cancel_background(self) -> None:
        for job in [job for job in self.jobs.values() if job.background]:
            job.handle.cancel()
            self._cancel(job)

    def _prefill(self) -> None:
        """Run one chunk, or several that begin within half of `target_itl_ms`.

        So short prompts that came at once join the next decode step at once. Between chunks newcomers are let in.
        """
        begun, job = time.perf_counter(), self._next_prefill()
        while job is not None:
            self._run_step(job)
            if self._decide("pause", partial(self._must_pause, begun)):
                return
            self._read_inbox()
            self._admit()
            job = self._next_prefill()

    def _must_pause(self, begun: float) -> bool:
        spent = time.perf_counter() - begun
        return spent > max(_NOTHING_S, _TICK_SHARE * self._config.target_itl_ms / 1e3) or bool(self._cancelled_ids())

    def _next_prefill(self) -> Job | None:
        uid = self._scheduler.pick()
        return None if uid is None else self.jobs[uid]

    def _run_step(self, job: Job) -> None:
        begun = time.perf_counter()
        self._chunks.begin(job)
        try:
            try:
                event = next(job.steps)
            except StopIteration as ended:
                event, job.result = None, ended.value
            if event is None:
                self._finish_prefill(job)
        except Exception as error:  # noqa: BLE001 - one job must not end the others
            log_failure(log, "prefill failed", error)
            self._fail(job, error)
            return
        job.step_s = self._decide("time", lambda: time.perf_counter() - begun)  # by which the scheduler chooses
        if event is not None:
            self._chunks.observe(job, event)
            self._emit(job, event)

    def _finish_prefill(self, job: Job) -> None:
        """Begin to decode after the last prefill chunk. A job without an answer ends here, with its result."""
        if not isinstance(job, AnswerJob):
            self._forget(job)
            job.on_end(job.result)
            return
        logits, job.result = job.result, None
        try:
            self._answer(job, logits)
        finally:
            job.active.store()

    def _answer(self, job: AnswerJob, logits: mx.array) -> None:
        """Begin to decode. The first token goes out at once."""
        active = job.active
        if active.request.max_tokens == 0:
            active.store()
            self._end_answered(job, Finished("length", 0, active.report()))
            return
        active.stage = "decode"
        self._scheduler.to_decode(job.uid)
        self._decoding[job.uid] = job
        self._report_token(job, self._rows.add(active, logits))

    def _decode(self) -> None:
        for uid, outcome in self._rows.step():
            if isinstance(outcome, Exception):
                self._fail(self._decoding[uid], outcome)
            else:
                self._report_token(self._decoding[uid], outcome)

    def _report_token(self, job: AnswerJob, event: TokenEvent) -> None:
        active, most = job.active, job.active.request.max_tokens
        self.meter.add(1)
        self._device_errors.note_token()
        active.record(event)
        self._emit(job, event)
        if event.token in active.request.stop_token_ids:
            self._finish(job, "stop")
        elif (done := len(active.decoded.tokens)) >= most:
            self._finish(job, "length")
        elif done % ANSWER_TOKENS == 0:
            self._memory.extend(job.uid, min(most - done, ANSWER_TOKENS))

    # --- how jobs end ------------------------------------------------------------------------------------------------

    def _finish(self, job: AnswerJob, reason: FinishReason) -> None:
        """End a decoding row. Its cache stays for the next turn where it can."""
        active = job.active
        active.store()
        cache, tokens = self._rows.remove(job.uid)
        self._memory.settle(job, cache)  # so that there is more room for what is kept
        if active.decoded.shift == 0 and self._config.kv_bits is None:
            active.keep(self._caches, concat_tokens(active.request.prompt, tokens), cache)
        self._end_answered(job, Finished(reason, len(active.decoded.tokens), active.report()))

    def _end_answered(self, job: AnswerJob, event: Finished) -> None:
        self._end(job, event)
        if self._caches.enabled:
            self._densifier.follow(job.active, job.handle)

    def _cancel(self, job: Job) -> None:
        if job.uid in self._decoding:
            self._finish(self._decoding[job.uid], "cancelled")
            return
        job.stop()
        if isinstance(job, AnswerJob):
            job.active.store()
            self._end(job, Finished("cancelled", 0, job.active.report_given_up(job.done)))
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
