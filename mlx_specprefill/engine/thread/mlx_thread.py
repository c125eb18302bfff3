"""The MLX thread: which of several engines gets the next step, and what runs while there are no requests."""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import mlx.core as mx

from ...errors import EngineClosedError, RequestCancelled
from ..memory.shared import SharedMemory
from .inbox import Results
from .loop import IDLE_BEAT_S, EngineCore

T = TypeVar("T")
log = logging.getLogger(__name__)
_STUCK_BEAT_S = 0.02  # between two looks of a loop whose requests wait for memory that another engine holds
_THREAD_EXIT_S = 0.1  # where the system does not report the thread's end
_THREAD_EXIT_LIMIT_S = 10.0  # where it does


@dataclass(eq=False)
class _Member:
    loop: EngineCore
    spent: float = 0.0  # seconds of work, corrected for idle time
    worked: bool = False  # in the latest round
    due: float = 0.0  # time of its next idle tick, by the monotonic clock


class MLXThread:
    """The thread that creates and frees every array.

    Several engines share one. Each round runs one tick of the engine with requests that has had the least time.
    Background work runs when no engine has requests.

    Args:
        memory_limit: bytes for all its engines together; None: each goes by its own limit.

    Attributes:
        memory: the budget that its engines share.
    """

    def __init__(self, memory_limit: int | None = None) -> None:
        self.memory = SharedMemory(memory_limit)
        self._members: list[_Member] = []
        self._loops = weakref.WeakSet[EngineCore]()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wakened = threading.Event()
        self._lock = threading.Lock()
        self._open = False
        self._paused = 0.0  # start of the running call, or end of its last pause
        self._thread = threading.Thread(target=self._run, name="mlx-specprefill-engine", daemon=True)

    def __enter__(self) -> MLXThread:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread.

        Raises:
            EngineClosedError: it was closed before.
        """
        if self._open:
            return
        if self._thread.ident is not None:
            raise EngineClosedError("a closed MLX thread can't be started again")
        self._open = True
        self._thread.start()
        atexit.register(self.close)  # a thread that MLX has used must end before the interpreter finalises

    def close(self, timeout: float = 30.0) -> None:
        """Accept no more calls, end the remaining engines, and wait for the thread."""
        with self._lock:
            was_open, self._open = self._open, False
        if not was_open:
            return
        self.wake()
        self._thread.join(timeout)
        atexit.unregister(self.close)
        if sys.version_info < (3, 13) and not self._thread.is_alive():
            # join() returns before the thread's C++ destructors have run. One of them, MLX's compile cache, needs the
            # interpreter lock and aborts the process if the interpreter is finalising by then.
            _wait_until_gone(self._thread)

    def wake(self) -> None:
        """Wake the thread. May be called from any thread."""
        self._wakened.set()

    def call(self, call: Callable[[], T]) -> T:
        """Call a function on the thread between two rounds; return its result. Blocks.

        Raises:
            EngineClosedError: the thread is not running.
        """
        done = Results[T]()
        self._post(partial(done.fill, call))
        return done.wait()

    def add(self, loop: EngineCore) -> None:
        """Add a loop until its inbox is closed. Returns at once; `loop.ready` tells when it runs."""
        self._post(partial(self._begin, loop))

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._open:
                raise EngineClosedError("the MLX thread is not running")
            self._calls.put(call)
        self.wake()

    def release(self) -> None:
        """Return the memory of a closed engine to the system. Blocks."""
        self.call(gc.collect)
        self.call(mx.clear_cache)

    def pause(self) -> None:
        """Give the engines with requests as much time as the running `call` has had since its last pause.

        Call it on the thread itself, outside of recordings and measurements.

        Raises:
            RequestCancelled: the thread is closing.
        """
        if not self._open:
            raise RequestCancelled
        self._look_after([member for member in self._members if not member.loop.busy])
        until = 2 * time.perf_counter() - self._paused
        while self._turn() and time.perf_counter() < until:
            pass
        self._paused = time.perf_counter()

    # --- on the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._open:
                self._wakened.wait(self._rest_s())
                self._wakened.clear()
                self._take_calls()
                if not self._turn():
                    self._idle()
            self._take_calls()
            for member in list(self._members):
                self._end(member)
        finally:
            for loop in self._loops:
                loop.ended.set()
                loop.ready.set()

    def _take_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            self._paused = time.perf_counter()
            call()

    def _begin(self, loop: EngineCore) -> None:
        self._loops.add(loop)
        try:
            loop.begin()
        except Exception:
            log.exception("an engine could not begin")
            loop.end()
            return
        self._members.append(_Member(loop, max((member.spent for member in self._members), default=0.0)))

    def _rest_s(self) -> float:
        """Return the seconds until the next idle tick."""
        if not self._calls.empty():
            return 0.0
        rests = (_STUCK_BEAT_S if member.loop.stuck else member.loop.rest_s for member in self._members)
        return min(rests, default=IDLE_BEAT_S)

    def _turn(self) -> bool:
        """Run one tick of the engine with requests that has had the least time; return False if no engine has any."""
        for ended in [member for member in self._members if member.loop.has_ended]:
            self._end(ended)
        working = [member for member in self._members if member.loop.busy]
        if not working:
            return False
        if len(self._members) == 1:  # nobody to share the time with
            working[0].loop.step()
            return True
        self._even_out(working)
        next_one = min(working, key=lambda member: member.spent)
        elsewhere = any(member.loop.answering for member in working if member is not next_one)
        begun = time.perf_counter()
        next_one.loop.step(False, elsewhere)
        next_one.spent += time.perf_counter() - begun
        self._look_after(member for member in self._members if not member.worked)
        return True

    def _even_out(self, working: list[_Member]) -> None:
        """Correct the times of engines that were idle: they earn no credit."""
        least = min((member.spent for member in working if member.worked), default=None)
        for member in self._members:
            begins = member in working and not member.worked
            if begins and least is not None:
                member.spent = max(member.spent, least)
            member.worked = member in working

    def _look_after(self, others: Iterable[_Member]) -> None:
        """Run the idle ticks of loops without requests."""
        now = time.monotonic()
        for member in others:
            member.loop.beat = now
            if now >= member.due:
                member.due = now + (_STUCK_BEAT_S if member.loop.stuck else IDLE_BEAT_S)
                member.loop.step(background=False)

    def _idle(self) -> None:
        for member in self._members:
            member.worked = False
            member.loop.step()

    def _end(self, member: _Member) -> None:
        self._members.remove(member)
        member.loop.end()


def _wait_until_gone(thread: threading.Thread) -> None:
    """Wait for the system's part of a joined thread, as Linux reports it; elsewhere for a fixed time."""
    threads = Path("/proc/self/task")
    if not threads.is_dir():
        time.sleep(_THREAD_EXIT_S)
        return
    until = time.monotonic() + _THREAD_EXIT_LIMIT_S
    while (threads / str(thread.native_id)).exists() and time.monotonic() < until:
        time.sleep(1e-3)
