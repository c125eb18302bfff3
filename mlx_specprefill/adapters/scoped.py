"""Sets the value by which the wrapped functions of mlx act, for the current thread and one block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Active(threading.local, Generic[T]):
    """A value for the wrapped calls of the current thread.

    Blocks nest: the innermost value counts, and the end of a block restores the one around it.
    """

    value: T | None = None

    @contextmanager
    def during(self, value: T) -> Iterator[T]:
        """Set the current thread's value inside the block."""
        outer, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = outer
