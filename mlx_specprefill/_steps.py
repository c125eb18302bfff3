"""Work in steps: a generator that yields its progress and returns its result, iterated with `for`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

__all__ = ["Steps"]

P = TypeVar("P")
R = TypeVar("R")


class Steps(Generic[P, R]):
    """An iterator over the steps of a generator.

    Attributes:
        result: the generator's return value, after the last step.
    """

    result: R

    def __init__(self, work: Generator[P, None, R]) -> None:
        self._work = work

    def __iter__(self) -> Steps[P, R]:
        return self

    def __next__(self) -> P:
        try:
            return next(self._work)
        except StopIteration as finished:
            self.result = finished.value
            raise

    def finish(self) -> R:
        """Run the remaining steps; return the result."""
        for _ in self:
            pass
        return self.result
