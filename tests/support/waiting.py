"""Waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(check: Callable[[], bool], within: float = 60.0) -> bool:
    """Return whether the check holds now or once within that many seconds. It need not hold a moment later."""
    until = time.monotonic() + within
    while not check():
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True
