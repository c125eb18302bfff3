"""Tokens per second lately."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_METER_S = 5


class Meter:
    """Recent rate of an event per second. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque(maxlen=_METER_S + 1)  # (second, count)

    def add(self, count: int) -> None:
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1] = (now, self._seconds[-1][1] + count)
        else:
            self._seconds.append((now, count))

    def per_second(self) -> float:
        """Return the rate over the last whole seconds; 0 if nothing happened."""
        now = int(self._clock())
        return sum(count for second, count in tuple(self._seconds) if now - _METER_S <= second < now) / _METER_S
