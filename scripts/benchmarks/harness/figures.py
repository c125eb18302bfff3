"""Clocks, statistics of alternating arms, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from mlx_specprefill import BLAS

_DOUBT = 0.05  # of a 95 % interval
WIDTH = 200  # columns of a table at most: a file has no width of its own


class Clock:
    """Wall and CPU time since its start, in ms. On a CPU backend the latter is valid on a busy machine."""

    def __init__(self) -> None:
        self._begun = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        wall, cpu = time.perf_counter() - self._begun[0], time.process_time() - self._begun[1]
        return {"ms": 1e3 * wall, "cpu_ms": 1e3 * cpu}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call and its result."""
    clock = Clock()
    result = work()
    return clock.read()["ms"], result


def median_interval(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Return two of the values that enclose the median with 95 % confidence, whatever their distribution.

    That the k smallest of n all lie above it, or the k largest below, happens as seldom as so many heads in n throws.
    It takes six values.
    """
    ordered, count = sorted(values), len(values)
    left_out = 0
    while 2 * sum(math.comb(count, heads) for heads in range(left_out + 1)) <= _DOUBT * 2**count:
        left_out += 1
    return (ordered[left_out - 1], ordered[count - left_out]) if left_out else (None, None)


def machine() -> dict[str, Any]:
    """Return the description of the machine."""
    return {"device": str(mx.default_device()), "blas": BLAS.library, "mlx": version("mlx")}


def rounded(value: Any, digits: int = 4) -> Any:
    """Round every float in a value."""
    if isinstance(value, Mapping):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part, digits) for part in value]
    return round(value, digits) if isinstance(value, float) else value


def number(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if abs(value) < 20 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def show(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """Print a table. Its first column holds names, the others figures."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(number, row))
    Console(width=WIDTH).print(table)


def show_rows(rows: Sequence[Mapping[str, Any]], title: str | None = None) -> None:
    """Print the rows of a report."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    show(names, [[row.get(name) for name in names] for row in rows], title)
