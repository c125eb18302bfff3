"""The inbox of the MLX thread: jobs and calls from other threads, the limit of waiting ones, results on their way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from ...errors import EngineClosedError
from ..requests.failures import strip_traceback
from ..requests.job import Job
from ..requests.scheduler import Scheduler

_SIGNAL_S = 0.5
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

    def close(self) -> bool:
        """Close the inbox and wake the MLX thread; return False if it was closed already."""
        with self._lock:
            was_open, self._open = self._open, False
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

    def _check_open(self) -> None:
        if not self._open:
            raise EngineClosedError("the engine is not running")
