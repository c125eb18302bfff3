"""How far the reading of a prompt is, as streams tell it: llama.cpp's object, as often as was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlx_specprefill import Progress

__all__ = ["ProgressTeller"]


class ProgressTeller:
    """Chooses which steps of a prefill one stream tells.

    A client that asked for progress gets every step. The others get none of a prefill that takes less than `every`
    seconds, and one step in so many seconds of a longer one: a sign of life that says how long it will take.

    Args:
        every: seconds.
        asked: whether the client asked for progress.
        clock: seconds; for tests.
    """

    def __init__(self, every: float, asked: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self.asked, self._clock = every, asked, clock
        self._started = clock()
        self._due: float | None = None  # None: the engine has not begun

    def tell(self, event: Progress) -> dict[str, Any] | None:
        """What the stream is to say of this step, if anything. Nothing is said before the cache's share is known."""
        now = self._clock()
        if self._due is None:
            self._due = now + self._every
        if event.cached is None or not (self.asked or now >= self._due):
            return None
        self._due = now + self._every
        return self._body(event, now)

    def _body(self, event: Progress, now: float) -> dict[str, Any]:
        """llama.cpp's progress object, in which `processed` includes `cache`.

        `stage` says of which model it speaks: the draft reads the whole prompt, the target what is cached or was
        selected.
        """
        cached = event.cached or 0
        if event.stage == "prefill":
            total, processed = event.total + cached, event.done + cached
        else:
            total, processed = event.total, max(event.done, cached)
        elapsed = round(1e3 * (now - self._started))
        return {"total": total, "cache": cached, "processed": processed, "time_ms": elapsed, "stage": event.stage}
