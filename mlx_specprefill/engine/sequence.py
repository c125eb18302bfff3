"""The record of a request, the job that runs it, and the inbox through which jobs reach the MLX thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.prefix.nodes import CacheHit, Fed
from ..constraints import GrammarState
from ..errors import EngineClosedError, InvalidRequestError, RequestCancelled
from ..loading import ModelPair
from ..request import (
    Event,
    Failed,
    GenerationRequest,
    PrefillReport,
    PrefixMiss,
    Progress,
    ScorerKind,
    Stage,
    Timings,
    TokenEvent,
    TokenIds,
    Verdict,
)
from ..specprefill.plan import PrefillPlan
from ..specprefill.selector import kept_spans
from ..specprefill.sparse_prefill import HiddenStates
from .caches import EngineCaches
from .scheduler import Scheduler
from .speculation import AnswerDrafter


def log_failure(log: logging.Logger, what: str, error: BaseException | None) -> None:
    """Log a failure with its traceback, or without it if the request was invalid: the client gets the reason."""
    if isinstance(error, InvalidRequestError):
        log.info("%s: %s", what, error)
    else:
        log.error(what, exc_info=error)


class Need(NamedTuple):
    """Bytes that a request will need.

    Attributes:
        held: while it runs.
        working: in addition, for its largest forward. Forwards take turns: requests share the largest.
    """

    held: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.held + self.working


@dataclass
class Sequence:
    """State of one request.

    Attributes:
        plan: of the prefill; made when the request is submitted, revised once the cached prefix is known.
        need: the predicted memory, as admission reserves it.
        choice: the name under which a sparse prefix is found and kept; None: the prompt is read in full.
        cached: prompt tokens that a cached prefix covers.
        miss: why less of it is cached than the cache holds; None: for no reason known.
        held: prompt indices in a sparse prefix, int32, ascending; None: it holds all.
        kept: prompt indices the target has seen, int32, or None for all of them.
        scorer, scoring: the scorer of the prompt, if any, and a description of its method.
        draft_read: tokens that the draft read for the prompt, in its own tokenizer.
        recalled: tokens dropped by an earlier turn and read for this one.
        cache, shift: the target's cache once prefilled, and the shift that it can't carry itself.
        staged: the caches of the target's first layers hold more tokens than the others.
        hidden: those layers' hidden states of the prompt; `hidden_parts`: of the cached prefix.
        lower: those layers' caches of the prompt, until they are joined to `cache`.
        stage: the stage of the current step.
        tokens: generated so far; `sparse_logprobs`: of each, if the answer will be verified.
        grammar: state of the request's grammar and budget.
        drafting: drafts the answer; None if that was not asked for.
        unstored: stores the prompt for later requests, once the first token is out.
    """

    uid: int
    request: GenerationRequest
    plan: PrefillPlan
    submitted: float = 0.0
    grammar: GrammarState | None = None
    drafting: AnswerDrafter | None = None
    started: float = 0.0
    need: Need = field(default_factory=Need)
    cached: int = 0
    miss: PrefixMiss | None = None
    choice: str | None = None
    held: npt.NDArray[np.int32] | None = None
    hidden_parts: Seq[tuple[int, mx.array]] = ()
    kept: npt.NDArray[np.int32] | None = None
    scorer: ScorerKind | None = None
    scoring: str | None = None
    draft_read: int = 0
    recalled: int = 0
    cache: list[Any] = field(default_factory=list)
    shift: int = 0
    staged: bool = False
    hidden: HiddenStates | None = None
    lower: list[Any] = field(default_factory=list)
    stage: Stage = "queued"
    tokens: list[int] = field(default_factory=list)
    sparse_logprobs: list[float] = field(default_factory=list)
    spent_ms: dict[str, float] = field(default_factory=dict)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    unstored: Callable[[], None] | None = None

    def resume(self, hit: CacheHit) -> None:
        """Start from a cached prefix."""
        self.cached, self.cache, self.hidden_parts = hit.length, hit.cache, hit.hidden
        self.held = None if hit.held is None else np.sort(hit.held)

    @property
    def reads_all(self) -> bool:
        """Return whether the prompt is read in full, behind a dense prefix at most."""
        return self.plan.mode == "full" and self.held is None

    @property
    def tokens_cached(self) -> int:
        """Return the prompt tokens that the target need not read."""
        return self.cached if self.held is None else int(self.held.size)

    @property
    def run(self) -> int:
        """Return the tokens of the cached prefix before its first gap."""
        return self.cached if self.held is None else Fed(self.held).run

    def store(self) -> None:
        """Run the deferred store. The cache may hold more tokens by now, but must be this sequence's own."""
        if self.unstored is not None:
            store, self.unstored = self.unstored, None
            store()

    def keep(self, caches: EngineCaches, tokens: TokenIds, cache: list[Any]) -> None:
        """Cache the conversation for its next turn: the prompt and the answer's tokens that the cache has read."""
        if self.kept is None:
            caches.keep_target(tokens, cache, self.request)
        elif self.choice is not None:
            caches.keep_target(tokens, cache, self.request, self.choice, self.hidden)

    def model(self, pair: ModelPair) -> Callable[..., mx.array]:
        """Return the model that continues the sequence's cache."""
        return pair.stages if self.staged and pair.stages else pair.target

    def spend(self, stage: Stage, ms: float) -> None:
        """Add a step's own time to its stage. Other requests' time does not count."""
        self.spent_ms[stage] = self.spent_ms.get(stage, 0.0) + ms

    @property
    def is_to_verify(self) -> bool:
        """Return whether a verdict on the answer is wanted: the prompt was read in part."""
        return self.request.specprefill.verify is not None and self.kept is not None

    @property
    def logprobs(self) -> int | None:
        """Return how many alternatives per token to report, None for no log-probabilities at all."""
        return self.request.logprobs or (0 if self.is_to_verify else self.request.logprobs)

    def record(self, event: TokenEvent) -> None:
        now = time.perf_counter()
        if not self.tokens:
            self.first_token_at = now
        self.last_token_at = now
        self.tokens.append(event.token)
        if event.logprob is not None and self.is_to_verify:
            self.sparse_logprobs.append(event.logprob)

    def report(self) -> PrefillReport:
        M = len(self.request.prompt)
        kept = M if self.kept is None else int(self.kept.size)
        spans = ((0, M),) if self.kept is None else kept_spans(self.kept)
        return PrefillReport(
            mode=self.plan.mode,
            reason=self.plan.reason,
            prompt_tokens=M,
            kept_tokens=kept,
            cached_tokens=self.tokens_cached,
            recalled_tokens=self.recalled,
            kept_share=None if self.kept is None else round(kept / M, 6),
            scorer=self.scorer if self.kept is not None else None,
            scoring=self.scoring if self.kept is not None else None,
            draft_tokens=self.draft_read,
            timings=self._timings(),
            predicted=self.plan.predicted,
            kept_spans=spans if self.request.specprefill.return_spans else None,
            speculation=None if self.drafting is None else self.drafting.report(),
            scope=None if self.kept is None else self.plan.scope,
            miss=self.miss,
        )

    def _timings(self) -> Timings:
        started = self.started or time.perf_counter()
        return Timings(
            queue_ms=1e3 * (started - self.submitted),
            draft_ms=self.spent_ms.get("draft", 0.0),
            select_ms=self.spent_ms.get("select", 0.0),
            prefill_ms=self.spent_ms.get("prefill", 0.0),
            ttft_ms=1e3 * max(0.0, self.first_token_at - started) if self.tokens else 0.0,
            decode_ms=1e3 * (self.last_token_at - self.first_token_at),
        )


log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


def noop(_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Description of a job, as sent to other ranks.

    Attributes:
        what: one of `Engine`'s kinds of work.
        plan: of a request with an answer.
        args: further arguments.
    """

    uid: int
    what: str
    request: GenerationRequest
    plan: PrefillPlan | None = None
    args: tuple[Any, ...] = ()


@dataclass
class Job:
    """A job. Lives on the MLX thread once it was posted.

    Attributes:
        steps: the work; yields events, returns the result.
        sequence: None for inspections and background tasks.
        cached: tokens that the target need not read, as a background task reports them.
        need: the predicted memory of a job without sequence.
        done: tokens per stage, as last reported.
        on_end: gets the result or the exception of a job without sequence.
        step_s: seconds that its latest step took.
        result: of the work, once it is done.
        work: its description; None for background tasks, which every rank starts by itself.
    """

    uid: int
    on_event: OnEvent
    handle: RequestHandle
    steps: Generator[Any, None, Any]
    sequence: Sequence | None = None
    on_end: Callable[[Any], None] = noop
    background: bool = False
    cached: int = 0
    need: Need = field(default_factory=Need)
    done: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    result: Any = None
    work: TaskSpec | None = None

    def depth(self, stage: str) -> int:
        """Return the number of tokens that the model of this stage has read."""
        cached = self.cached if self.sequence is None else self.sequence.tokens_cached
        return self.done.get(stage, 0) + (cached if stage == "prefill" else 0)

    def advance(self) -> Event | None:
        """Run one step; return its event, or None if the work is done and `result` is set."""
        try:
            event: Event = next(self.steps)
        except StopIteration as finished:
            self.result = finished.value
            return None
        if isinstance(event, Progress) and event.stage != "queued" and self.sequence is not None:
            return replace(event, cached=self.sequence.cached)
        return event

    def stop(self) -> None:
        """Cancel the work. It may keep what it has finished."""
        try:
            self.steps.throw(RequestCancelled())
        except (RequestCancelled, StopIteration):
            pass
        except Exception:
            log.exception("cleaning up a cancelled request failed")
        self.steps.close()

    def lose(self, error: Exception) -> None:
        """Report a failure, and nothing afterwards. May be called from any thread."""
        on_event, self.on_event = self.on_event, noop
        on_end, self.on_end = self.on_end, noop
        if self.sequence is None:
            on_end(error)
        else:
            on_event(Failed(error, self.sequence.report()))

    def emit(self, event: Event) -> None:
        """Call the callback. If it raises, its job is cancelled and it is not called again."""
        try:
            self.on_event(event)
        except Exception:
            log.exception("a request's callback failed")
            self.handle.cancel()
            self.on_event = noop


def strip_traceback(error: Exception) -> Exception:
    """Return the error without tracebacks, also in its causes: their arrays would live as long as the event does."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


class RequestHandle:
    """Handle of a queued request. Usable from any thread, also after the last event."""

    def __init__(self, on_verdict: Callable[[Verdict], None] = noop) -> None:
        """Args:
        on_verdict: called on the MLX thread, once, after a sparse answer that was to be verified.
        """
        self.on_verdict = on_verdict
        self._cancelled = threading.Event()
        self._expecting = threading.Event()

    def cancel(self) -> None:
        """Stop within one step. The last event is then `Finished` with reason "cancelled"."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def expect_more(self) -> None:
        """Note that the conversation goes on, because the answer calls a tool: its text is densified first."""
        self._expecting.set()

    @property
    def expecting(self) -> bool:
        return self._expecting.is_set()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A function to call on the MLX thread.

    Attributes:
        method, arguments: what other ranks have to call on their caches, if anything.
    """

    run: Callable[[], None]
    method: str | None = None
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> None:
        self.run()


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
        result = self.get()
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
        self._uids = 0
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
        with self._lock:
            self._uids += 1
            return self._uids

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
