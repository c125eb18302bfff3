"""A value for the calls of one thread, inside one block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Active"]

T = TypeVar("T")


class Active(threading.local, Generic[T]):
    """What wrapped calls of the current thread are to use or to report to.

    Blocks nest: the innermost value counts, and leaving a block brings back the one around it.

    Attributes:
        value: None outside of every block.
    """

    value: T | None = None

    @contextmanager
    def during(self, value: T) -> Iterator[T]:
        """Inside the block, `value` is the current thread's."""
        outer, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = outer
