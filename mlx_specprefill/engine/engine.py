"""The engine's calls, from any thread: check and submit requests, inspect, replay, list and drop prefixes, health.

Calls go through an inbox (`inbox.py`) to the engine's loop (`loop.py`) on that thread (`mlx_thread.py`), which
answers through one callback per request.
"""

from __future__ import annotations

import atexit
import queue
import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..cache.prefix.nodes import CacheEntry
from ..choosing.constraints import Grammars, GrammarState, ReasoningBudgetState
from ..choosing.sampling import LOGITS_ROWS, check_sampling
from ..config import EngineConfig
from ..errors import ContextLengthError, DeviceError, EngineClosedError, EngineError, InvalidRequestError
from ..events import Event, Failed, Finished, OnEvent, Progress, noop
from ..loading.footprint import weights_by_array
from ..pair import ModelPair
from ..prefill_report import Prediction
from ..request import Constraint, GenerationRequest, as_token_ids
from ..selection.plan import PrefillPlan
from ..verdict import Verdict
from .decoding.answers import Rows
from .estimating import EstimatesState
from .memory.reservations import Memory, MemoryUse, check_limit
from .memory.wired import wire
from .prefixes.caches import EngineCaches, Erasure
from .reading.chunks import ChunkSizer
from .reading.costs import CostModel
from .reading.inspection import Inspection, Replay, inspect_prompt, replay_continuation
from .reading.prefill import Prefiller
from .requests.active_request import ActiveRequest, Times
from .requests.drafting import Speculator
from .requests.job import AnswerJob, Job, RequestHandle, TaskSpec
from .requests.scheduler import PATIENCE, Scheduler
from .thread.background import BackgroundPrefill
from .thread.device_errors import DeviceErrors
from .thread.inbox import Inbox, Results
from .thread.loop import EngineCore
from .thread.mlx_thread import MLXThread

_ERASING_S = 0.01  # between two looks whether the disk has forgotten


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`heartbeat_age_s` is the time since the loop last finished a step or woke up idle.

    `lost`: why nothing can be computed any more; None while it can. `background`: a job runs that no request waits for.
    """

    alive: bool
    heartbeat_age_s: float
    running: int
    queued: int
    lost: str | None = None
    background: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot. Counts run since the start.

    Attributes:
        waiting, prefilling, decoding: requests now.
        max_rows, max_queue: how many may be in work, and how many may wait.
        fallbacks: sparse prefills that failed and became full ones, by the stage that failed.
        densified, densified_tokens: sparse turns whose prompt was prefilled in full afterwards, in idle time.
        prefix_hits, prefix_misses: requests that found a dense prefix in the target's cache, or none.
        prefix_tokens: prompt tokens that they did not have to prefill.
        tokens_per_second: generated lately, by all requests together.
        evictions: prefixes that memory had no room for; `disk_evictions`: records dropped from disk.
    """

    waiting: int
    prefilling: int
    decoding: int
    max_rows: int
    max_queue: int
    fallbacks: Mapping[str, int]
    densified: int
    densified_tokens: int
    prefix_hits: int
    prefix_misses: int
    prefix_tokens: int
    evictions: int
    disk_evictions: int
    memory: MemoryUse
    tokens_per_second: float = 0.0


class Engine:
    """Runs requests for a pair. Use as a context manager, or call `start()` and `close()`.

    Args:
        thread: on which it runs beside other engines, started by its owner; None: on one of its own. The config's
            memory limit then is this engine's part of the thread's.
        pinned: its models are never unloaded: the other engines plan with the rest of the memory.

    Attributes:
        pair, config: what it was made with. The other parts belong to the MLX thread.
        wired: bytes that macOS keeps resident for it, since `start`.
    """

    # The parts that `ranked.RankedEngine` has others of.
    _caches_type: Callable[..., EngineCaches] = EngineCaches
    _chunks_type: Callable[..., ChunkSizer] = ChunkSizer
    _prefiller_type: Callable[..., Prefiller] = Prefiller
    _memory_type: Callable[..., Memory] = Memory
    _densifier_type: Callable[..., BackgroundPrefill] = BackgroundPrefill
    _loop_type: Callable[..., EngineCore] = EngineCore

    def __init__(
        self,
        pair: ModelPair,
        config: EngineConfig | None = None,
        *,
        thread: MLXThread | None = None,
        pinned: bool = False,
    ) -> None:
        self.pair = pair
        self.config = config or EngineConfig()
        self._owns_thread = thread is None
        self._thread = thread or MLXThread(self.config.memory_limit)
        check_limit(pair, self.config)
        self.caches = self._caches_type(pair, self.config)
        self.scheduler = Scheduler(self.config.max_rows, round(PATIENCE * self.config.target_itl_ms) or 1)
        self.costs = CostModel(pair, self.config)
        chunks = self._chunks_type(pair, self.config, self.scheduler, self.costs)
        self._speculator = Speculator(pair, self.config, lambda: bool(self.scheduler.decoding))
        self.prefiller = self._prefiller_type(pair, self.config, self.caches, self.costs, chunks)
        self.memory = self._memory_type(pair, self.config, self.caches, self._thread.memory, pinned)
        self.rows = Rows(pair, self.config)
        self._grammars = Grammars(pair.tokenizer, pair.eos_token_ids)
        self.densifier = self._densifier_type(self.prefiller, self.memory, self._guide, self.rows.quantize)
        self._inbox = Inbox(self.scheduler, self.config.max_queue, self._thread.wake)
        device_errors = DeviceErrors(self.caches, self.memory, chunks.halve)
        self.caches.on_error = device_errors.note
        self.loop = self._loop_type(
            self.config,
            self._inbox,
            self.scheduler,
            self.memory,
            self.caches,
            chunks,
            self.costs,
            self.rows,
            self.densifier,
            device_errors,
        )
        self._makers: dict[str, Callable[..., Job]] = {
            "answer": self._answer_job,
            "inspect": self._inspection_job,
            "replay": self._replay_job,
        }
        self._started = False
        self.wired = 0

    @classmethod
    def load(cls, read: Callable[[Callable[[], None]], ModelPair], config: EngineConfig | None = None) -> Engine:
        """Load a pair on the MLX thread that will run it, and make its engine. Blocks.

        Args:
            read: returns the pair. It is given a function to call from time to time, which raises `RequestCancelled`
                when the caller has been interrupted.
        """
        thread = MLXThread(config.memory_limit if config else None)
        thread.start()
        try:
            engine = cls(thread.call(partial(read, thread.pause)), config, thread=thread)
        except BaseException:  # Ctrl-C included
            thread.close()
            raise
        engine._owns_thread = True
        return engine

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the engine's own MLX thread, if it has one, and wait for its memory measurements.

        Raises:
            EngineClosedError: the engine or the thread is closed, or the start failed (see the log).
        """
        if self._inbox.is_open:
            return
        if self._started:
            raise EngineClosedError("a closed engine can't be started again")
        weights = weights_by_array(self.pair.target, self.pair.draft)
        self.wired = wire(self.config.wired_limit, self._thread.memory.weights(beside=weights))
        self._started = True
        if self._owns_thread:
            self._thread.start()
        self._inbox.open()
        try:
            self._thread.add(self.loop)
            self.loop.ready.wait()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if self.loop.ended.is_set():
            raise EngineClosedError("the engine could not begin; the log says why")
        atexit.register(self.close)

    def close(self, timeout: float = 30.0) -> None:
        """Refuse new requests, cancel all others, and wait until its loop and its own thread end."""
        was_open = self._inbox.close()
        if was_open and self._thread.is_alive:
            self.loop.ended.wait(timeout)
        atexit.unregister(self.close)
        if self._owns_thread:
            self._thread.close(timeout)

    # --- state --------------------------------------------------------------------------------------------------------

    def health(self) -> EngineHealth:
        """Return the engine's state. May be called from any thread.

        A request between queue and prefill may count in both, never in neither.
        """
        age, queued = time.monotonic() - self.loop.beat, self._inbox.waiting
        alive = self._thread.is_alive and not self.loop.ended.is_set()
        background = any(job.background for job in tuple(self.loop.jobs.values()))
        return EngineHealth(alive, age, self.scheduler.running, queued, self.loop.fatal, background)

    @property
    def window(self) -> int:
        """Return the tokens of prompt and answer that one request may have: the model's limit, or that of memory."""
        return self.memory.window()

    def stats(self) -> EngineStats:
        """Return counters and gauges. Never waits for the MLX thread: the parts may be one step apart."""
        waiting, decoding = self._inbox.waiting, len(self.scheduler.decoding)
        return EngineStats(
            waiting=waiting,
            prefilling=max(0, self.scheduler.running - decoding),
            decoding=decoding,
            max_rows=self.config.max_rows,
            max_queue=self.config.max_queue,
            fallbacks=dict(self.prefiller.fallbacks),
            densified=self.densifier.count,
            densified_tokens=self.densifier.tokens,
            **self.caches.counts(),
            memory=self.memory.use(),
            tokens_per_second=self.loop.meter.per_second(),
        )

    def cached(self, owner: str | None = None) -> tuple[CacheEntry, ...]:
        """Return the cached prefixes, most recently used first. Blocks for at most one step.

        Args:
            owner: of the labels under which they are kept (`CacheLabel.owner`); None: everybody's.

        Raises:
            EngineClosedError: the engine is not running.
        """
        return self._inbox.call(partial(self.caches.entries, owner))

    def drop_cached(self, name: str | None = None, owner: str | None = None) -> bool:
        """Remove one entry of `cached(owner)`, or all of them, from memory and disk. Blocks until the files are gone.

        Running requests keep their copies. Without a name, nothing that was asked before is read or stored again: what
        waits for idle time is given up, and running requests leave nothing. The folder is rid of all that the owner
        asked of any model. Returns False if there is none of that name.

        Raises:
            EngineClosedError: the engine is not running.
            EngineError: some of it could not be deleted from disk; the log says why.
        """
        if name is not None:
            if not self._inbox.call(partial(self.loop.drop, name, owner), "drop", name, owner):
                return False
        else:
            self._grammars.forget()
            at = time.monotonic()
            self._inbox.call(partial(self.loop.forget, owner, at), "forget", owner, at)
        while (state := self._inbox.call(self.loop.erasure, "erasure")) == Erasure.PENDING:
            time.sleep(_ERASING_S)
        if state == Erasure.FAILED:
            raise EngineError(f"the prompts in {self.config.prefix_cache_dir} could not be deleted; the log says why")
        return True

    def predict(self, tokens: int, kept: int) -> Prediction:
        """Return the times of both prefills of a prompt of which nothing is cached. May be called from any thread.

        Args:
            kept: tokens that the target would see.
        """
        return self.prefiller.planner.predict(tokens, 0, kept)

    @property
    def estimates(self) -> EstimatesState:
        """Return what is known of the estimates of unread tokens. May be called from any thread."""
        return self.prefiller.estimating.state

    @property
    def is_measured(self) -> bool:
        """Return whether `predict` tells from forwards on this machine. May be called from any thread."""
        return self.costs.are_measured

    # --- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: GenerationRequest) -> PrefillPlan:
        """Check that a request can run, and return its plan.

        Raises:
            InvalidRequestError: names the field; ContextLengthError when the prompt leaves no room.
        """
        check_request(request, self.pair)
        if request.constraint is not None:
            self._grammars.check(request.constraint, request.made)
        plan = self.prefiller.planner.plan(request)
        if plan.mode == "sparse" and not self.memory.can_ever(request, "sparse"):
            words = "a sparse prefill needs more memory than there is"
            plan = replace(plan.as_full("memory", words), selection_key=None)
        if not self.memory.can_ever(request, plan.mode):
            window = self.memory.window(request)
            raise ContextLengthError(len(request.prompt), request.max_tokens, window)
        return plan

    def compile(self, constraint: Constraint) -> None:
        """Compile a grammar before `submit`, which then takes no time. Blocks for up to some hundred milliseconds.

        Raises:
            InvalidRequestError: the grammar is invalid.
        """
        self._grammars.check(constraint)

    @property
    def verifies(self) -> bool:
        """Return whether sparse answers can be compared with full reading: prompts become dense, and are kept."""
        return self.config.policy.densify and self.caches.enabled

    def submit(
        self, request: GenerationRequest, on_event: OnEvent, on_verdict: Callable[[Verdict], None] = noop
    ) -> RequestHandle:
        """Queue a request. The MLX thread calls both callbacks, which must be quick and must not raise.

        Args:
            on_verdict: called once after a sparse answer with `SpecPrefillOptions.verify`, if the engine `verifies`.

        Raises:
            InvalidRequestError: the request can never run.
            EngineClosedError: the engine is not running, or `max_queue` requests wait already.
        """
        job = self._make_job("answer", request, self.check(request))
        job.handle.on_verdict = on_verdict
        return self._start(job, on_event)

    def _start(self, job: Job, on_event: OnEvent, on_end: Callable[[Any], None] = noop) -> RequestHandle:
        if self.loop.fatal is not None:
            raise DeviceError(self.loop.fatal)
        job.on_event, job.on_end = on_event, on_end
        self._inbox.post(job)
        return job.handle

    def _make_job(self, kind: str, *arguments: Any) -> Job:
        return self._make_described(TaskSpec(self._inbox.next_uid(), kind, arguments))

    def _make_described(self, task: TaskSpec) -> Job:
        """Make a job from its description, on any rank. It is not queued yet."""
        job = self._makers[task.kind](task.uid, *task.arguments)
        job.task = task
        return job

    def _answer_job(self, uid: int, request: GenerationRequest, plan: PrefillPlan) -> Job:
        drafting = self._speculator.drafter(request, self.memory.can_draft(request, plan.mode))
        active = ActiveRequest(uid, request, plan, Times(time.perf_counter()), self._guide(request), drafting)
        need = self.memory.need(request, plan.mode)
        return AnswerJob(uid, self.prefiller.run(active), need, active=active)

    def _inspection_job(self, uid: int, request: GenerationRequest) -> Job:
        return Job(uid, inspect_prompt(self.prefiller, request), self.memory.need_inspection(request))

    def _replay_job(self, uid: int, request: GenerationRequest, continuation: tuple[int, ...], keep: bool) -> Job:
        steps = replay_continuation(self.prefiller, request, continuation, keep)
        counted, mode = replace(request, max_tokens=len(continuation)), self.prefiller.planner.plan(request).mode
        return Job(uid, steps, self.memory.need(counted, mode, LOGITS_ROWS))

    def generate(self, request: GenerationRequest) -> Generator[Event, None, None]:
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
        """Score and select without running the target. Blocks.

        Raises:
            SparseUnsupportedError: there is no draft.
            InvalidRequestError: as for `submit`.
        """

        def report(event: Event) -> None:
            if on_progress is not None and isinstance(event, Progress):
                on_progress(event)

        done = Results[Inspection]()
        self.submit_inspection(request, report, done.put)
        return done.wait()

    def submit_inspection(
        self, request: GenerationRequest, on_event: OnEvent, on_end: Callable[[Inspection | Exception], None]
    ) -> RequestHandle:
        """Run `inspect` without blocking. Both callbacks are called on the MLX thread, `on_end` exactly once.

        Raises:
            InvalidRequestError, EngineClosedError: as for `submit`.
        """
        self.check(request)
        return self._start(self._make_job("inspect", request), on_event, on_end)

    def replay(self, request: GenerationRequest, continuation: Tokens[int], keep: bool = False) -> Replay:
        """Prefill a request, then feed a given continuation instead of generating one. Blocks.

        Args:
            keep: cache the result for the conversation's next turn, as after an answer.

        Raises:
            InvalidRequestError: as for `submit`, the continuation counting as the answer.
        """
        self.check(replace(request, max_tokens=len(continuation)))
        done = Results[Replay]()
        self._start(self._make_job("replay", request, tuple(continuation), keep), noop, done.put)
        return done.wait()

    def _guide(self, request: GenerationRequest) -> GrammarState | None:
        grammar = None
        if request.constraint is not None:
            stops, least = request.stop_token_ids, request.min_tokens
            grammar = self._grammars.state(request.constraint, stops, least, request.made)
        return grammar if request.reasoning is None else ReasoningBudgetState(request.reasoning, grammar)


def check_request(request: GenerationRequest, pair: ModelPair) -> None:
    """Check that a request can run with this pair. Checks neither grammars nor memory.

    Raises:
        InvalidRequestError: names the field; ContextLengthError when the prompt leaves no room.
    """
    M = len(request.prompt)
    if M == 0:
        raise InvalidRequestError("the prompt is empty", field="prompt")
    if request.max_tokens < 0:
        raise InvalidRequestError("max_tokens must be at least 0", field="max_tokens")
    if M + request.max_tokens > pair.context_length:
        raise ContextLengthError(M, request.max_tokens, pair.context_length)
    if request.prompt.min() < 0 or request.prompt.max() >= pair.readable_vocab:
        raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise InvalidRequestError("min_tokens must be between 0 and max_tokens", field="min_tokens")
    _check_budget(request, pair)
    _check_questions(request, pair)
    _check_importance(request)
    check_sampling(request.sampling, pair.vocab_size)


def _check_budget(request: GenerationRequest, pair: ModelPair) -> None:
    budget = request.reasoning
    if budget is None:
        return
    named = (*budget.start, *budget.end, *budget.closing)
    if budget.tokens < 0 or not (budget.start and budget.end and budget.closing[: len(budget.end)] == budget.end):
        message = "reasoning needs tokens >= 0, a start, and a closing that begins with its end"
        raise InvalidRequestError(message, field="reasoning")
    if not all(0 <= token < pair.vocab_size for token in named):
        raise InvalidRequestError("reasoning has token ids outside the vocabulary", field="reasoning")


def _check_questions(request: GenerationRequest, pair: ModelPair) -> None:
    for i, question in enumerate(request.questions):
        ids = np.concatenate([question.tokens, *(as_token_ids(label) for label in question.labels)])
        if not question.tokens.size or len(question.labels) < 2 or not all(question.labels):
            raise InvalidRequestError("a question needs tokens, and labels of tokens", field=f"questions[{i}]")
        if ids.min() < 0 or ids.max() >= pair.vocab_size:
            raise InvalidRequestError("it has token ids outside the vocabulary", field=f"questions[{i}]")
        if (M := len(request.prompt)) + question.room > pair.context_length:
            raise ContextLengthError(M, question.room, pair.context_length, f"questions[{i}]")


def _check_importance(request: GenerationRequest) -> None:
    importance = request.specprefill.importance
    if importance is None:
        return
    if importance.shape != (len(request.prompt),) or not np.isfinite(importance).all():
        raise InvalidRequestError("importance must be one finite number per prompt token", field="importance")
