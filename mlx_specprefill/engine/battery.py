"""The machine's battery: while it is in use, nothing is computed that no request waits for."""

from __future__ import annotations

import time

import psutil

__all__ = ["Battery"]

_LOOK_EVERY_S = 30.0


class Battery:
    """Tells whether the machine runs on battery. Its sensors are read at most every 30 s."""

    def __init__(self) -> None:
        self._next_look = 0.0  # by the monotonic clock
        self._is_in_use = False

    @property
    def is_in_use(self) -> bool:
        """False also where there is no battery, or where nothing says whether it is plugged in."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            found = psutil.sensors_battery()
            self._is_in_use = found is not None and found.power_plugged is False
        return self._is_in_use
