"""Calls that any thread posts to the event loop, few at a time and in order; and a timer that is postponed."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any


class ThreadsafeCalls:
    """Calls on one event loop, in the order in which any thread posted them.

    A step of the engine makes one event per running answer. Waking the loop for each event costs the MLX thread a
    system call, which releases the interpreter while the device waits for work.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[[Any], object], Any]] = deque()
        self._awake = False

    def post(self, call: Callable[[Any], object], item: Any) -> None:
        """Post a call of `call(item)` on the loop, from any thread. It does nothing once the loop is closed."""
        self._waiting.append((call, item))
        if self._awake:
            return
        self._awake = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._awake = False  # first: every later post wakes the loop again
        while self._waiting:
            call, item = self._waiting.popleft()
            try:
                call(item)
            except Exception as error:  # noqa: BLE001 - one that raises takes no other along
                self._loop.call_exception_handler({"message": f"{call} failed", "exception": error})


class KeepAliveTimer:
    """A timer that calls `ring` after every `after` seconds without a postponement. Postponing costs no timer."""

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
