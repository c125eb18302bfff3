"""A generator of slices seen by somebody else on its way."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

__all__ = ["mapped"]

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")


def mapped(slices: Generator[A, None, R], change: Callable[[A], B]) -> Generator[B, None, R]:
    """Yields what `change` makes of each yield, and returns what `slices` returns."""
    while True:
        try:
            progress = next(slices)
        except StopIteration as finished:
            result: R = finished.value
            return result
        yield change(progress)
