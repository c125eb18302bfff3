"""Worker threads for rendering and tokenizing prompts, and how long they have been busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Workers"]

T = TypeVar("T")


class Workers:
    """Runs calls in order of arrival, `count` of them at a time."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="prompts")
        self._waiting: set[object] = set()
        self._begun: dict[object, float] = {}  # by the monotonic clock

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result. A caller that is cancelled takes a call along that has not begun."""
        job = object()
        self._waiting.add(job)
        future = self._pool.submit(self._watched, job, call)
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._waiting.discard(job)

    @property
    def waiting(self) -> int:
        """Calls that no thread has begun."""
        return len(self._waiting)

    @property
    def longest_s(self) -> float:
        """How long the oldest of those that were begun has been running; 0: none is."""
        return max((time.monotonic() - begun for begun in list(self._begun.values())), default=0.0)

    def _watched(self, job: object, call: Callable[[], T]) -> T:
        self._waiting.discard(job)
        self._begun[job] = time.monotonic()
        try:
            return call()
        finally:
            del self._begun[job]

    def close(self) -> None:
        """No more calls; those in work end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)
