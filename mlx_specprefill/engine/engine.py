"""The MLX thread: every array lives and dies here.

Callers talk to it from any thread through an inbox; it talks back through one callback per request. Each tick is one
decode step of all running answers, then at most one slice of one prefill (`scheduler.py` says whose). Whatever happens
to one request, the loop goes on.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..cache.positioned import quantize_kv
from ..config import EngineConfig
from ..constraints import Grammars, Guide
from ..decoding.batch import DecodeBatch, DecodeRow, RowFailed
from ..errors import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    RequestCancelled,
    SparseUnsupportedError,
)
from ..loading import ModelPair
from ..request import Constraint, Event, Failed, Finished, FinishReason, GenerationRequest, Progress, TokenEvent
from ..sampling import LogitsProcessor, check_sampling, held_back, logits_processors, make_sampler
from .admission import Admission, Footprint
from .caches import EngineCaches
from .calibration import calibrated
from .densify import DensifyQueue, SparseTurn
from .footprint import default_limit, measure_footprint, weight_bytes
from .handle import RequestHandle
from .inspection import Inspection, inspect_prompt
from .prefiller import Prefiller
from .replay import Replay, replay_continuation
from .scheduler import Scheduler, SliceSizer
from .sequence import Sequence
from .speculation import Speculator
from .stats import CachedTokens, EngineStats, MemoryUse, Meter

__all__ = ["Engine", "EngineHealth"]

log = logging.getLogger(__name__)
T = TypeVar("T")
OnEvent = Callable[[Event], None]
_IDLE_BEAT_S = 0.5
_QUIET_S = 1.0  # without requests before background work begins: an agent's next turn often comes at once
_TELLING = 32  # tokens of a slice from which on its time says something about speed
_PATIENCE = 4  # times `slice_target_ms`: how long a prefill may wait while others are served
_TICK_SHARE = 0.25  # of `slice_target_ms`: short slices share a tick until that much time is spent
_THREAD_EXIT_S = 0.1
_ANSWER_TOKENS = 2048  # of the answer that admission counts: clients ask for the whole context and use little of it


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`heartbeat_age_s` is the time since the loop last finished a slice of work or woke up idle."""

    alive: bool
    heartbeat_age_s: float
    running: int
    queued: int


@dataclass
class _Job:
    """A request, an inspection or a background task inside the engine."""

    uid: int
    on_event: OnEvent
    handle: RequestHandle
    slices: Generator[Any, None, Any]
    sequence: Sequence | None = None  # None for inspections and background tasks
    done: dict[str, int] = field(default_factory=dict)  # tokens per stage, as last reported
    on_end: Callable[[Any], None] = lambda _: None  # gets the result or the exception of a job without sequence
    background: bool = False
    slice_s: float = 0.0  # that its latest slice took

    def depth(self, stage: str) -> int:
        """Tokens that the model of this stage holds already."""
        cached = self.sequence.cached if self.sequence is not None and stage == "prefill" else 0
        return cached + self.done.get(stage, 0)


class Engine:
    """Runs requests for a pair. Use as a context manager, or `start()` and `close()`."""

    def __init__(self, pair: ModelPair, config: EngineConfig | None = None) -> None:
        self.pair = pair
        self.config = config or EngineConfig()
        self.caches = EngineCaches(pair, self.config)
        self.speculator = Speculator(pair, self.config, lambda: bool(self._scheduler.decoding))
        self.prefiller = Prefiller(pair, self.config, self.caches, self._slice_size, self.speculator)
        self._scheduler = Scheduler(self.config.max_rows, round(_PATIENCE * self.config.slice_target_ms) or 1)
        self._sizer = SliceSizer(
            self.config.prefill_step, min(64, self.config.prefill_step), self.config.slice_target_ms
        )
        self._batch = DecodeBatch(pair.target)
        self._grammars = Grammars(pair.tokenizer, pair.eos_token_ids)
        self._jobs: dict[int, _Job] = {}
        self._admission = Admission(None, 0)
        self._target_cost = self._draft_cost = Footprint(0, 0, 0)
        self._densify = DensifyQueue()
        self._densifying: tuple[SparseTurn, RequestHandle] | None = None
        self._last_end = 0.0  # of a request, by the monotonic clock
        self._slicing: _Job | None = None
        self._given = 0  # tokens of the latest slice at most
        self.densified = self.densified_tokens = 0  # sparse turns whose prompt was made dense afterwards
        self._weights = (0, 0)  # bytes of target and draft
        self._meter = Meter()  # of generated tokens
        self._inbox: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uids = 0
        self._unread = 0  # submitted, not yet seen by the loop
        self._open = False
        self._ready = threading.Event()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="mlx-specprefill-engine", daemon=True)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the MLX thread, and wait until it has measured what a sequence costs.

        Raises:
            EngineClosedError: the engine was closed before.
        """
        if self._open:
            return
        if self._thread.ident is not None:
            raise EngineClosedError("a closed engine can't be started again")
        maybe_set_recommended_wired_limit()
        self._open = True
        self._thread.start()
        self._ready.wait()
        atexit.register(self.close)  # a thread that MLX has used must be gone before the interpreter finalises

    def close(self, timeout: float = 30.0) -> None:
        """Refuse new requests, cancel what runs and what waits, and wait for the thread."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._inbox.put(None)
        self._thread.join(timeout)
        atexit.unregister(self.close)
        if sys.version_info < (3, 13):
            # There join() returns before the thread's C++ destructors have run; MLX's compile cache is one of them,
            # needs the interpreter lock, and aborts the process if the interpreter is finalising by then.
            time.sleep(_THREAD_EXIT_S)

    def health(self) -> EngineHealth:
        age = time.monotonic() - self._beat
        queued = self._scheduler.waiting + self._unread
        return EngineHealth(self._thread.is_alive(), age, self._scheduler.running, queued)

    def stats(self) -> EngineStats:
        """What it does and holds now. Never waits for the MLX thread: the parts may be one step apart."""
        waiting, decoding = self._scheduler.waiting + self._unread, len(self._scheduler.decoding)
        return EngineStats(
            waiting=waiting,
            prefilling=max(0, self._scheduler.running - decoding),
            decoding=decoding,
            max_rows=self.config.max_rows,
            max_queue=self.config.max_queue,
            fallbacks=dict(self.prefiller.fallbacks),
            densified=self.densified,
            densified_tokens=self.densified_tokens,
            **self.caches.counts(),
            memory=self._memory(),
            tokens_per_second=self._meter.per_second(),
        )

    def _memory(self) -> MemoryUse:
        held = [self._held_bytes(job) for job in tuple(self._jobs.values())]
        sessions = self.caches.sessions.nbytes
        return MemoryUse(
            target_weights=self._weights[0],
            draft_weights=self._weights[1],
            requests=sum(held),
            reserved=self._admission.reserved,
            prefix_cache=max(0, self.caches.nbytes - sessions),
            sessions=sessions,
            prefix_disk=self.caches.disk_nbytes,
            active=mx.get_active_memory(),
            spare=mx.get_cache_memory(),
            limit=self._admission.limit,
        )

    def _held_bytes(self, job: _Job) -> int:
        """Of a request's target cache, as far as it has come."""
        sequence = job.sequence
        if sequence is None or sequence.stage == "queued":
            return 0
        stored = sequence.cached + job.done.get("prefill", 0)
        if sequence.stage == "decode":
            read = len(sequence.request.prompt) if sequence.kept is None else int(sequence.kept.size)
            stored = read + len(sequence.tokens)
        return self._target_cost.constant + self._target_cost.per_token * stored

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never run.

        Raises:
            InvalidRequestError: names the field; ContextLengthError when the prompt leaves no room.
        """
        M = len(request.prompt)
        if M == 0:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if request.max_tokens < 0 or (request.max_tokens == 0 and request.prompt_logprobs is None):
            raise InvalidRequestError("max_tokens must be at least 1", field="max_tokens")
        if M + request.max_tokens > self.pair.context_length:
            raise ContextLengthError(M, request.max_tokens, self.pair.context_length)
        if not all(0 <= token < self.pair.vocab_size for token in request.prompt):
            raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt")
        if not 0 <= request.min_tokens <= request.max_tokens:
            raise InvalidRequestError("min_tokens must be between 0 and max_tokens", field="min_tokens")
        _check_importance(request)
        check_sampling(request.sampling, self.pair.vocab_size)
        if request.constraint is not None:
            self._grammars.check(request.constraint)
        need = self._need(request)
        if not self._admission.can_ever(need):
            raise InvalidRequestError(
                f"the request needs {need >> 20} MiB of memory, more than the limit leaves", field="messages"
            )

    def compile(self, constraint: Constraint) -> None:
        """Compile a grammar ahead of `submit`, which then takes no time; blocks, up to some hundred milliseconds.

        Raises:
            InvalidRequestError: what is wrong with the grammar.
        """
        self._grammars.check(constraint)

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> RequestHandle:
        """Queue a request. `on_event` is called on the MLX thread; it must be quick and must not raise.

        Raises:
            InvalidRequestError: the request can never run.
            EngineClosedError: the engine is not running, or `max_queue` requests wait already.
        """
        self.check(request)
        handle = RequestHandle()
        sequence = Sequence(self._next_uid(), request, time.perf_counter(), self._guide(request))
        self._post(_Job(sequence.uid, on_event, handle, self.prefiller.run(sequence), sequence))
        return handle

    def generate(self, request: GenerationRequest) -> Iterator[Event]:
        """Submit and yield the events as they come; closing the iterator cancels."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = self.submit(request, events.put)
        try:
            while True:
                event = events.get()
                yield event
                if isinstance(event, (Finished, Failed)):
                    return
        finally:
            handle.cancel()

    def inspect(self, request: GenerationRequest, on_progress: Callable[[Progress], None] | None = None) -> Inspection:
        """Score and select without prefilling the target; blocks.

        Raises:
            SparseUnsupportedError: there is no draft.
            InvalidRequestError: as for `submit`.
        """
        self.check(request)

        def report(event: Event) -> None:
            if on_progress is not None and isinstance(event, Progress):
                on_progress(event)

        return self._wait_for(inspect_prompt(self.prefiller, request), report)

    def submit_inspection(
        self, request: GenerationRequest, on_event: OnEvent, on_end: Callable[[Inspection | Exception], None]
    ) -> RequestHandle:
        """`inspect` without waiting. Both callbacks are called on the MLX thread; `on_end` exactly once.

        Raises:
            InvalidRequestError, EngineClosedError: as for `submit`.
        """
        self.check(request)
        return self._start(inspect_prompt(self.prefiller, request), on_event, on_end)

    def cached(self) -> tuple[CachedTokens, ...]:
        """What is kept for later requests, last used first; blocks for as long as one slice.

        Raises:
            EngineClosedError: the engine is not running.
        """
        return self._call(self.caches.entries)

    def drop_cached(self, name: str | None = None) -> bool:
        """Forget one of `cached`, in memory and on disk, or everything; blocks for as long as one slice.

        Requests in work keep what they have taken. False when there is none of that name.

        Raises:
            EngineClosedError: the engine is not running.
        """
        if name is not None:
            return self._call(partial(self.caches.drop, name))
        self._call(self.caches.clear)
        return True

    def _call(self, call: Callable[[], T]) -> T:
        """Call something on the MLX thread, between two slices; its result."""
        done: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

        def answer() -> None:
            try:
                done.put(call())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller, not to the loop
                done.put(_bare(error))

        with self._lock:
            if not self._open:
                raise EngineClosedError("the engine is not running")
            self._inbox.put(answer)
        return _result(done)

    def replay(self, request: GenerationRequest, continuation: Tokens[int], attention: bool = False) -> Replay:
        """Prefill as the request says, then feed a given continuation instead of generating one; blocks.

        Args:
            attention: also report where the target looks while it reads the continuation.

        Raises:
            InvalidRequestError: as for `submit`, the continuation counting as the answer.
        """
        self.check(replace(request, max_tokens=len(continuation)))
        slices = replay_continuation(self.prefiller, request, tuple(continuation), attention)
        return self._wait_for(slices, lambda _: None)

    def _wait_for(self, slices: Generator[Any, None, T], on_event: OnEvent) -> T:
        """Run a job without answer on the MLX thread; its result."""
        done: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()
        self._start(slices, on_event, done.put)
        return _result(done)

    def _start(
        self, slices: Generator[Any, None, T], on_event: OnEvent, on_end: Callable[[T | Exception], None]
    ) -> RequestHandle:
        handle = RequestHandle()
        self._post(_Job(self._next_uid(), on_event, handle, slices, on_end=on_end))
        return handle

    def _guide(self, request: GenerationRequest) -> Guide | None:
        if request.constraint is None:
            return None
        return self._grammars.guide(request.constraint, request.stop_token_ids, request.min_tokens)

    def _next_uid(self) -> int:
        with self._lock:
            self._uids += 1
            return self._uids

    def _post(self, job: _Job) -> None:
        with self._lock:
            if not self._open:
                raise EngineClosedError("the engine is not running")
            waiting = self._scheduler.waiting + self._unread
            if waiting >= self.config.max_queue:
                raise EngineClosedError(f"{waiting} requests are waiting already")
            self._unread += 1
        self._inbox.put(job)

    # --- the MLX thread ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._prepare()
        finally:
            self._ready.set()
        while self._open or not self._inbox.empty():
            self._beat = time.monotonic()
            self._read_inbox()
            if self._open:
                self._guarded_tick()
        for job in list(self._jobs.values()):
            self._cancel(job)
        self.caches.close()

    def _prepare(self) -> None:
        """Measure what a sequence costs. A model that can't even do this is told to its first request."""
        limit = self.config.memory_limit or default_limit()
        head = 0 if isinstance(self.pair.mtp, str) else self.pair.mtp.nbytes
        draft = weight_bytes(self.pair.draft) if self.pair.draft else 0
        self._weights = (weight_bytes(self.pair.target) + head, draft)
        try:
            if self.config.policy.threshold is None:
                self.prefiller.cost = calibrated(self.pair, self.config)
            self._target_cost = measure_footprint(self.pair.target, self.prefiller.longest_slice("prefill"))
            self._draft_cost = measure_footprint(self.pair.draft, self.prefiller.longest_slice("draft"))
        except Exception:
            log.exception("could not measure memory use: requests are admitted without a prediction")
            limit = None
        self._admission = Admission(limit, sum(self._weights), lambda: self.caches.nbytes, self.caches.reclaim)

    def _read_inbox(self) -> None:
        while True:
            try:
                rest = self._rest_s
                job = self._inbox.get(timeout=rest) if rest > 0 else self._inbox.get_nowait()
            except queue.Empty:
                return
            if job is None:
                return
            if not isinstance(job, _Job):
                job()
                continue
            with self._lock:
                self._jobs[job.uid] = job
                self._scheduler.add(job.uid)
                self._unread -= 1

    @property
    def _rest_s(self) -> float:
        """How long nothing is to be done unless a request comes."""
        if not self._open or not self._scheduler.idle:
            return 0.0
        quiet = time.monotonic() - self._last_end
        return min(_IDLE_BEAT_S, _QUIET_S - quiet) if self._densify else _IDLE_BEAT_S

    def _guarded_tick(self) -> None:
        """What no step could blame on one request ends those that run, never the loop."""
        try:
            self._tick()
        except Exception as error:
            log.exception("the engine starts over")
            for job in list(self._jobs.values()):
                self._fail(job, error)
            self._batch = DecodeBatch(self.pair.target)
            self.speculator.clear()

    def _tick(self) -> None:
        for job in [job for job in self._jobs.values() if job.handle.cancelled]:
            self._cancel(job)
        self._admit()
        self._decode()
        self._speculate()
        self._background()
        self._prefill()

    def _admit(self) -> None:
        while (uid := self._scheduler.next_waiting()) is not None:
            job = self._jobs[uid]
            need = self._need(job.sequence.request if job.sequence is not None else None)
            if self._admission.reserve(uid, need):
                self._scheduler.admit(uid)
                if job.sequence is not None:
                    job.sequence.started = time.perf_counter()
            elif self._scheduler.running == 0:
                # Nothing will free memory any more: what the prediction counts is not in our hands.
                self._end(job, Failed(EngineClosedError("not enough memory for this request now")))
            else:
                return

    def _need(self, request: GenerationRequest | None) -> int:
        """Predicted bytes: the prompt and the answer in the target, the prompt in the draft."""
        if request is None or self._admission.limit is None:
            return 0
        need = self._target_cost.of(len(request.prompt) + min(request.max_tokens, _ANSWER_TOKENS))
        wants_draft = self.prefiller.plan(request).mode == "sparse"
        return need + (self._draft_cost.of(len(request.prompt)) if wants_draft else 0)

    def _slice_size(self, kind: str) -> int:
        job = self._slicing
        background = job is not None and job.background
        size = self._sizer.size(kind, bool(self._scheduler.decoding), background, 0 if job is None else job.depth(kind))
        self._given = min(size, self.prefiller.longest_slice(kind))
        return self._given

    def _prefill(self) -> None:
        """One slice of one prefill; more of them if they are so short that several prompts can join the next step."""
        end = time.perf_counter() + _TICK_SHARE * self.config.slice_target_ms / 1e3
        while (uid := self._scheduler.pick()) is not None:
            self._slice(uid)
            if time.perf_counter() + self._longest_slice_s() >= end:
                return

    def _longest_slice_s(self) -> float:
        """Seconds that the next slice may take, as far as is known; none is taken before a cancellation is seen."""
        if any(job.handle.cancelled for job in self._jobs.values()):
            return math.inf
        decoding = self._scheduler.decoding
        return max((job.slice_s for job in self._jobs.values() if job.uid not in decoding), default=0.0)

    def _slice(self, uid: int) -> None:
        job, begun = self._jobs[uid], time.perf_counter()
        self._slicing = job
        try:
            event = self._advance(job)
        except Exception as error:
            log.exception("prefill failed")
            self._fail(job, error)
            return
        job.slice_s = time.perf_counter() - begun
        if event is not None:
            self._account_slice(job, event, 1e3 * job.slice_s)
            self._emit(job, event)

    def _advance(self, job: _Job) -> Event | None:
        """The event of one slice; None when the job's prefill was over, and it has gone on to what follows."""
        try:
            event: Event = next(job.slices)
        except StopIteration as finished:
            self._prefilled(job, finished.value)
            return None
        if isinstance(event, Progress) and event.stage != "queued" and job.sequence is not None:
            return replace(event, cached=job.sequence.cached)
        return event

    def _account_slice(self, job: _Job, event: Event, ms: float) -> None:
        if not isinstance(event, Progress):
            return
        depth = job.depth(event.stage)
        tokens = max(0, event.done - job.done.get(event.stage, 0))
        job.done[event.stage] = event.done
        self._scheduler.served(job.uid, tokens, round(ms))
        if job.sequence is not None:
            job.sequence.spend(event.stage, ms)
        # More than was given out came from the draft's cache; next to nothing is not about speed.
        if event.stage in ("draft", "prefill") and _TELLING <= tokens <= self._given:
            self._sizer.observe(event.stage, tokens, ms, depth)

    def _prefilled(self, job: _Job, result: Any) -> None:
        """The last slice is done: on to decoding, or, for other jobs, the result to whoever waits."""
        sequence = job.sequence
        if sequence is None:
            self._forget(job)
            job.on_end(result)
            return
        if sequence.request.max_tokens == 0:
            self._end(job, Finished("length", 0, sequence.account()))
            return
        sequence.stage = "decode"
        self._quantize(sequence)
        self._scheduler.to_decode(job.uid)
        row = self.speculator.add(sequence, result, _processors(sequence.request))
        if row is None:
            self._add_plain(sequence, result)
            return
        sequence.cache = []  # the row owns it now
        for event in row.early:
            self._decoded(job, event)

    def _add_plain(self, sequence: Sequence, logits: mx.array) -> None:
        """One more row of the batch; it chooses its next token from `logits` (1, V)."""
        request = sequence.request
        self._batch.add(
            DecodeRow(
                uid=sequence.uid,
                cache=sequence.cache,
                logits=logits,
                sampler=make_sampler(request.sampling, self.pair.vocab_size),
                processors=_processors(request),
                logprobs=request.logprobs,
                shift=sequence.shift,
                guide=sequence.guide,
                generated=tuple(sequence.tokens),
            )
        )
        sequence.cache = []  # the batch owns it now

    def _quantize(self, sequence: Sequence) -> None:
        if self.config.kv_bits is None:
            return
        try:
            sequence.cache, sequence.shift = quantize_kv(sequence.cache, self.config.kv_group_size, self.config.kv_bits)
        except SparseUnsupportedError as error:
            log.warning("the KV cache stays unquantised: %s", error.reason)

    def _decode(self) -> None:
        """One token for every row. A failing forward fails the rows in it; the loop goes on with an empty batch."""
        if not len(self._batch):
            return
        try:
            events = self._batch.step()
        except RowFailed as failed:
            log.error("a row failed", exc_info=failed.__cause__)
            self._batch.remove(failed.uid)
            cause = failed.__cause__
            self._fail(self._jobs[failed.uid], cause if isinstance(cause, Exception) else failed)
            return
        except Exception as error:
            log.exception("decode step failed")
            for uid in self._batch.uids:
                self._fail(self._jobs[uid], error)
            self._batch = DecodeBatch(self.pair.target)
            return
        self._meter.add(len(events))
        for uid, event in events:
            self._decoded(self._jobs[uid], event)

    def _speculate(self) -> None:
        """One forward of one row that decodes by proposals."""
        uid = self.speculator.next_turn()
        if uid is None:
            return
        try:
            why = self.speculator.leaves(uid, len(self._batch) + len(self.speculator) - 1)
            events, why = self.speculator.step(uid, why)
        except Exception as error:
            log.exception("a speculative row failed")
            self.speculator.remove(uid)
            self._fail(self._jobs[uid], error)
            return
        for event in events:
            self._decoded(self._jobs[uid], event)
        if why is not None and uid in self.speculator:
            self._join_batch(uid, why)

    def _join_batch(self, uid: int, why: str) -> None:
        """Let a speculative row go on as a plain one."""
        row, sequence = self.speculator.row(uid), self._sequence(uid)
        self.speculator.remove(uid).reason += f"; then plain decoding: {why}"
        sequence.cache = row.cache
        self._add_plain(sequence, row.logits)

    def _decoded(self, job: _Job, event: TokenEvent) -> None:
        sequence = self._sequence(job.uid)
        sequence.record(event.token)
        self._emit(job, event)
        if job.uid not in self._jobs:
            return
        if event.token in sequence.request.stop_token_ids:
            self._finish(job, "stop")
        elif len(sequence.tokens) >= sequence.request.max_tokens:
            self._finish(job, "length")

    def _sequence(self, uid: int) -> Sequence:
        sequence = self._jobs[uid].sequence
        assert sequence is not None
        return sequence

    def _finish(self, job: _Job, reason: FinishReason) -> None:
        """End a decoding row; what its cache holds may serve the next turn."""
        sequence = self._sequence(job.uid)
        cache, tokens = self._remove(job.uid)
        if sequence.shift == 0 and self.config.kv_bits is None:
            self._keep(sequence, (*sequence.request.prompt, *tokens), cache, job.handle)
        self._end(job, Finished(reason, len(sequence.tokens), sequence.account()))

    def _remove(self, uid: int) -> tuple[list[Any], tuple[int, ...]]:
        """Take a row out: its cache, and the generated tokens in it."""
        if uid not in self.speculator:
            removed = self._batch.remove(uid)
            return removed.cache, removed.tokens
        row = self.speculator.row(uid)
        self.speculator.remove(uid)
        return row.cache, tuple(row.tokens)

    def _keep(self, sequence: Sequence, tokens: tuple[int, ...], cache: list[Any], handle: RequestHandle) -> None:
        if sequence.kept is None:
            self.caches.keep_target(tokens, cache)
            return
        assert sequence.plan is not None
        self.caches.keep_session(tokens, cache, sequence.plan.keep)
        if self.config.policy.densify and self.caches.enabled:
            self._densify.add(SparseTurn(sequence.request.prompt, tuple(sequence.tokens), handle))

    def _background(self) -> None:
        """With nothing else to do, make the prompt of a sparse turn dense in the exact cache."""
        turn = self._densify.first()
        if turn is None or self._scheduler.running or self._scheduler.waiting or self._rest_s > 0:
            return
        if self._densifying is None:
            self._start_densifying(turn)
        elif turn.outranks(self._densifying[0]):
            self._densifying[1].cancel()  # its finished slices stay in the cache, and its turn in the queue

    def _start_densifying(self, turn: SparseTurn) -> None:
        handle = RequestHandle()
        slices = self.prefiller.dense(turn.tokens)
        on_end = partial(self._densified, turn)
        job = _Job(self._next_uid(), lambda _: None, handle, slices, on_end=on_end, background=True)
        self._densifying = turn, handle
        self._jobs[job.uid] = job
        self._scheduler.add_background(job.uid)

    def _densified(self, turn: SparseTurn, result: object) -> None:
        self._densifying = None
        if isinstance(result, RequestCancelled):
            return
        self._densify.discard(turn)
        if not isinstance(result, Exception):
            self.densified += 1
            self.densified_tokens += len(turn.tokens)

    def _cancel(self, job: _Job) -> None:
        sequence = job.sequence
        if sequence is not None and job.uid in self._scheduler.decoding:
            self._finish(job, "cancelled")
            return
        try:
            job.slices.throw(RequestCancelled())
        except (RequestCancelled, StopIteration):
            pass
        except Exception:
            log.exception("cleaning up a cancelled request failed")
        job.slices.close()
        if sequence is not None:
            self._end(job, Finished("cancelled", 0, sequence.account()))
        else:
            self._forget(job)
            job.on_end(RequestCancelled() if job.handle.cancelled else EngineClosedError("the engine was closed"))

    def _fail(self, job: _Job, error: Exception) -> None:
        error = _bare(error)
        if job.sequence is not None:
            self._end(job, Failed(error, job.sequence.account()))
        else:
            self._forget(job)
            job.on_end(error)

    def _end(self, job: _Job, event: Event) -> None:
        self._last_end = time.monotonic()
        self._forget(job)
        self._emit(job, event)

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.uid, None)
        self._scheduler.remove(job.uid)
        self._admission.release(job.uid)

    def _emit(self, job: _Job, event: Event) -> None:
        """A callback that raises ends its own request only."""
        self._beat = time.monotonic()
        try:
            job.on_event(event)
        except Exception:
            log.exception("a request's callback failed")
            if job.uid in self._jobs:
                job.handle.cancel()
                job.on_event = lambda _: None


def _bare(error: Exception) -> Exception:
    """Without the frames that it and its causes went through: their arrays would live as long as the event does."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


def _result(done: queue.SimpleQueue[T | Exception]) -> T:
    """What was put there; an exception is raised."""
    result = done.get()
    if isinstance(result, Exception):
        raise result
    return result


def _processors(request: GenerationRequest) -> list[LogitsProcessor]:
    """Penalties and biases; a constraint keeps `min_tokens` itself."""
    processors = logits_processors(request.sampling)
    if request.min_tokens and request.constraint is None:
        processors.append(held_back(request.stop_token_ids, request.min_tokens))
    return processors


def _check_importance(request: GenerationRequest) -> None:
    importance = request.specprefill.importance
    if importance is None:
        return
    if importance.shape != (len(request.prompt),) or not np.isfinite(importance).all():
        raise InvalidRequestError("importance must be one finite number per prompt token", field="importance")
