"""Work that rank 0 does alone, in the midst of what all ranks do together."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ..errors import EngineError, RequestCancelled
from .ranks import Ranks

__all__ = ["led"]

P = TypeVar("P")
R = TypeVar("R")


def led(
    ranks: Ranks, what: str, begin: Callable[[], Generator[P, None, R]], on_step: Callable[[], object] = bool
) -> Generator[P, None, R]:
    """The steps and the result of rank 0's work: the other ranks wait for each, and compute nothing.

    Args:
        what: names the work, the same on all ranks.
        begin: begins the work; called on rank 0 alone. Its steps and its result go to the others: no arrays of MLX's.
        on_step: called on the others for every step.

    Raises:
        PeerLost: a process is gone.
        Exception: what the work raises, on all ranks; an error that can't be sent as an `EngineError`.
    """
    work = begin() if ranks.leads else None
    while True:
        kind, value = ranks.agree(what, lambda: _next(work))
        if kind == "error":
            raise value
        if kind == "result":
            return value  # type: ignore[no-any-return]
        if work is None:
            on_step()
        try:
            yield value
        except RequestCancelled as cancelled:
            if work is not None:
                work.throw(cancelled)  # it keeps what it has, and raises it again
            raise


def _next(work: Generator[Any, None, Any] | None) -> tuple[str, Any]:
    assert work is not None
    try:
        return "step", next(work)
    except StopIteration as finished:
        return "result", finished.value
    except Exception as error:  # noqa: BLE001 - it is raised on all ranks
        return "error", _sent(error)


def _sent(error: Exception) -> Exception:
    """The error, if the others can have the same one."""
    try:
        return error if type(pickle.loads(pickle.dumps(error))) is type(error) else _described(error)
    except Exception:  # noqa: BLE001 - whatever its class does when it is copied
        return _described(error)


def _described(error: Exception) -> Exception:
    return EngineError(f"{type(error).__name__}: {error}")
