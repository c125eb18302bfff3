"""Work that is cut into steps, run without pauses."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

T = TypeVar("T")


def finish(steps: Generator[Any, None, T]) -> T:
    """The result of a generator whose yields don't matter."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
