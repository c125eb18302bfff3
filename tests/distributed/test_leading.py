"""What rank 0 does alone, as it goes to the other ranks: here both are asked in one process, one after the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from typing import Any

import pytest

from mlx_specprefill import ALONE, EngineError, Ranks, RequestCancelled
from mlx_specprefill.distributed.leading import led


class Led(Ranks):
    """Rank 0 writes down what it tells; another rank reads it."""

    def __init__(self, told: list[bytes], rank: int) -> None:
        self.told, self.rank, self.size = told, rank, 2

    def agree(self, what: str, read: Callable[[], Any]) -> Any:
        if self.leads:
            self.told.append(pickle.dumps(read()))
            return pickle.loads(self.told[-1])
        return pickle.loads(self.told.pop(0))


class OwnError(Exception):
    """One that can be pickled and not read again."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)


def steps(error: Exception | None = None) -> Generator[int, None, str]:
    yield 1
    yield 2
    if error is not None:
        raise error
    return "done"


def never() -> Generator[int, None, str]:
    raise AssertionError("it is rank 0's work")


def taken(work: Generator[int, None, Any]) -> list[Any]:
    found: list[Any] = []
    try:
        while True:
            found.append(next(work))
    except StopIteration as finished:
        return [*found, finished.value]
    except (ValueError, EngineError) as error:
        return [*found, type(error), str(error)]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, ["done"]),
        (ValueError("no"), [ValueError, "no"]),
        (OwnError(1, "no"), [EngineError, "OwnError: no"]),
    ],
)
def test_steps_result_and_errors_are_the_same_on_all_ranks(error: Exception | None, end: list[Any]) -> None:
    told: list[bytes] = []
    asked: list[int] = []
    assert taken(led(Led(told, 0), "work", lambda: steps(error))) == [1, 2, *end]
    assert taken(led(Led(told, 1), "work", never, lambda: asked.append(1))) == [1, 2, *end]
    assert (told, asked) == ([], [1, 1])


def test_a_cancellation_reaches_the_work() -> None:
    kept: list[str] = []

    def work() -> Generator[int, None, None]:
        try:
            yield 1
        except RequestCancelled:
            kept.append("a prefix")
            raise

    begun = led(ALONE, "work", work)
    assert next(begun) == 1
    with pytest.raises(RequestCancelled):
        begun.throw(RequestCancelled())
    assert kept == ["a prefix"]
