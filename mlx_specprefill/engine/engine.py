"""The MLX thread: every array lives and dies here.

Callers talk to it from any thread through a bounded queue; it talks back through one callback per request. One request
runs at a time. Between two slices of work (a prefill step, a token) it looks at the request's cancel flag.
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..config import EngineConfig
from ..errors import EngineClosedError, RequestCancelled
from ..loading import ModelPair
from ..request import Event, Failed, Finished, GenerationRequest, Progress
from .inspection import ChunkInfo, Inspection, inspect_prompt
from .runner import Runner

__all__ = ["ChunkInfo", "Engine", "EngineHealth", "Inspection", "RequestHandle"]

log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]
_IDLE_BEAT_S = 0.5
_THREAD_EXIT_S = 0.1


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`heartbeat_age_s` is the time since the loop last finished a slice of work or woke up idle."""

    alive: bool
    heartbeat_age_s: float
    running: int
    queued: int


class RequestHandle:
    """The caller's end of a submitted request."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Stop within one slice of work; the last event is then `Finished` with reason "cancelled"."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()


@dataclass(frozen=True, slots=True)
class _Job:
    events: Generator[Event, None, None]  # not started yet; runs on the MLX thread
    on_event: OnEvent
    handle: RequestHandle


class Engine:
    """Runs requests for a pair. Use as a context manager, or `start()` and `close()`."""

    def __init__(self, pair: ModelPair, config: EngineConfig | None = None) -> None:
        self.pair = pair
        self.config = config or EngineConfig()
        self.runner = Runner(pair, self.config)
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._running = 0
        self._open = False
        self._beat = time.monotonic()
        self._current: RequestHandle | None = None
        self._thread = threading.Thread(target=self._loop, name="mlx-specprefill-engine", daemon=True)

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the MLX thread.

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
        atexit.register(self.close)  # a thread that MLX has used must be gone before the interpreter finalises

    def close(self, timeout: float = 30.0) -> None:
        """Refuse new requests, cancel what runs and what waits, and wait for the thread."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            if self._current is not None:
                self._current.cancel()
        self._jobs.put(None)
        self._thread.join(timeout)
        atexit.unregister(self.close)
        if sys.version_info < (3, 13):
            # There join() returns before the thread's C++ destructors have run; MLX's compile cache is one of them,
            # needs the interpreter lock, and aborts the process if the interpreter is finalising by then.
            time.sleep(_THREAD_EXIT_S)

    def health(self) -> EngineHealth:
        with self._lock:
            age = time.monotonic() - self._beat
            return EngineHealth(self._thread.is_alive(), age, self._running, self._waiting)

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> RequestHandle:
        """Queue a request. `on_event` is called on the MLX thread; it must be quick and must not raise.

        Raises:
            InvalidRequestError: the request can never run.
            EngineClosedError: the engine is not running, or `max_queue` requests wait already.
        """
        self.runner.check(request)
        handle = RequestHandle()
        self._enqueue(_Job(self.runner.run(request, time.perf_counter()), on_event, handle))
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
            EngineError: scoring failed.
        """
        self.runner.check(request)
        done: queue.SimpleQueue[Inspection | Exception] = queue.SimpleQueue()

        def work() -> Generator[Event, None, None]:
            try:
                yield Progress("queued", 0, len(request.prompt))
                inspection = yield from inspect_prompt(self.runner, request)
            except Exception as error:  # noqa: BLE001 - handed to the waiting caller
                done.put(error)
            else:
                done.put(inspection)

        def report(event: Event) -> None:
            if on_progress is not None and isinstance(event, Progress):
                on_progress(event)

        self._enqueue(_Job(work(), report, RequestHandle()))
        result = done.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _enqueue(self, job: _Job) -> None:
        with self._lock:
            if not self._open:
                raise EngineClosedError("the engine is not running")
            if self._waiting >= self.config.max_queue:
                raise EngineClosedError(f"{self._waiting} requests are waiting already")
            self._waiting += 1
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            self._beat = time.monotonic()
            try:
                job = self._jobs.get(timeout=_IDLE_BEAT_S)
            except queue.Empty:
                continue
            if job is None:
                break
            self._run_job(job)
        self._refuse_rest()

    def _run_job(self, job: _Job) -> None:
        with self._lock:
            self._waiting -= 1
            self._running += 1
            self._current = job.handle
            if not self._open:
                job.handle.cancel()
        try:
            self._pump(job)
        except Exception as error:
            log.exception("a request's callback failed")
            job.events.close()
            _deliver(job.on_event, Failed(error))
        with self._lock:
            self._running -= 1
            self._current = None

    def _pump(self, job: _Job) -> None:
        """Slice after slice until the last event; a cancelled request is told at its next slice."""
        for event in job.events:
            self._beat = time.monotonic()
            job.on_event(event)
            if job.handle.cancelled and not isinstance(event, (Finished, Failed)):
                break
        else:
            return
        try:
            job.on_event(job.events.throw(RequestCancelled()))
        except (StopIteration, RequestCancelled):
            return
        job.events.close()

    def _refuse_rest(self) -> None:
        while not self._jobs.empty():
            job = self._jobs.get_nowait()
            if job is not None:
                self._run_job(job)


def _deliver(on_event: OnEvent, event: Event) -> None:
    try:
        on_event(event)
    except Exception:
        log.exception("a request's callback failed")
