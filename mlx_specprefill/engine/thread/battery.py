"""Tells whether the machine runs on battery."""

from __future__ import annotations

import time

import psutil

_LOOK_EVERY_S = 30.0


class Battery:
    """Reports whether the machine runs on battery. Reads the sensors at most every 30 s."""

    def __init__(self) -> None:
        self._next_look = 0.0  # by the monotonic clock
        self._is_in_use = False

    @property
    def is_in_use(self) -> bool:
        """Return whether the machine runs on battery. False without a battery or where the state is unknown."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            found = psutil.sensors_battery()
            self._is_in_use = found is not None and found.power_plugged is False
        return self._is_in_use
