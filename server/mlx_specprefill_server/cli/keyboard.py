"""Single keys from a terminal, without Enter."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

try:
    import termios
    import tty
except ImportError:  # no POSIX terminal
    CAN_READ_KEYS = False
else:
    CAN_READ_KEYS = True

__all__ = ["pressed"]


@contextmanager
def pressed() -> Iterator[Callable[[float], str]]:
    """Gives a function that waits up to so many seconds for a key: the key, or "".

    Where standard input is no terminal it only waits.
    """
    if not (CAN_READ_KEYS and sys.stdin.isatty()):
        yield _only_wait
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield _read_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _only_wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read_key(seconds: float) -> str:
    """Several keys within that time count as one after the other."""
    until = time.monotonic() + seconds
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return ""
    key = sys.stdin.read(1)
    if not key:  # the terminal is gone
        time.sleep(max(0.0, until - time.monotonic()))
    return key
