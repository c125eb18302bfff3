"""One run of `mlx-specprefill eval`, from its options to its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import agents, corpus, suite
from .arms import Arm
from .errors import NothingToDoError
from .model_under_test import ModelUnderTest
from .records import Cell, Record, Records
from .report import markdown, summarise
from .tasks import CODE_QA, GROUPS, ORDER_TASKS, PLACE_TASKS, REAL, TASKS

Tell = Callable[[str], None]
Predict = Callable[[int, Arm], float]
"""Seconds that an arm's prefill of so many tokens takes."""

AGENTS = "agents"


@dataclass(frozen=True)
class Options:
    """Options of one run. If `out` is None, nothing is written and nothing can be resumed.

    `acceptance` takes the agents' sessions that are not for development.
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    arms: tuple[Arm, ...]
    number: int
    seed: int = 0
    out: Path | None = None
    acceptance: bool = False


def evaluate(options: Options, model: ModelUnderTest, tell: Tell, predict: Predict | None = None) -> dict[str, Any]:
    """Measure, write the report, and return it. `tell` gets lines for people, the expected cost first.

    Args:
        predict: estimate of prefill times; None if unknown.

    Raises:
        NothingToDoError: none of the named tasks exists.
        OtherRunError: `out` holds results of another run.
        UnreachableError: the server is gone; the results so far are kept.
    """
    sources, problems = _sources(options, model, tell)
    described = {**model.described, "seed": options.seed, **_corpus(sources), **_sessions(options)}
    records = Records(None if options.out is None else options.out / "items.jsonl", described)
    plan = suite.Plan(options.arms, options.number, options.seed)
    tell(announced(list(suite.work(plan, sources, records)), predict))
    asked: dict[tuple[Cell, int], None] = {}
    progress = _Progress(tell, sum(min(plan.number, source.size or plan.number) for source in sources))

    def heard(record: Record) -> None:
        asked[record.cell, record.number] = None
        progress(record)

    try:
        suite.run(plan, sources, model, records, heard)
    finally:
        mine = [record for record in records if (record.cell, record.number) in asked]
        report = {"run": described, **summarise(mine, options.arms), "left_out": problems}
        _write(options, report, tell)
    return report


def refuse_nothing(options: Options) -> None:
    """Raise `NothingToDoError` where no known task is named, for which a pair would be loaded in vain."""
    names, unknown = suite.choose_tasks([name for name in options.tasks if name != AGENTS])
    if not names and AGENTS not in options.tasks:
        raise NothingToDoError(f"nothing to measure: {'; '.join(map(_no_task, unknown))}")


def announced(work: Sequence[tuple[Cell, tuple[Arm, ...]]], predict: Predict | None) -> str:
    """Return a line that counts what is left to measure and, given `predict`, estimates the time of its prefills."""
    if not work:
        return "everything has been measured before"
    prefills = [(cell.length, arm) for cell, arms in work for arm in arms]
    tokens = sum(length for length, _ in prefills)
    said = f"to measure: {len(work)} items, {len(prefills)} prompts, about {tokens:,} tokens"
    if predict is None:
        return said
    return f"{said}; their prefills take about {_minutes(sum(predict(*prefill) for prefill in prefills))}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _sources(options: Options, model: ModelUnderTest, tell: Tell) -> tuple[list[suite.Source], list[str]]:
    names, unknown = suite.choose_tasks([name for name in options.tasks if name != AGENTS])
    problems = list(map(_no_task, unknown))
    sources = list(suite.synthetic(names, options.lengths, model))
    if AGENTS in options.tasks:
        sources += _agents(max(options.lengths), options.acceptance)
    for problem in problems:
        tell(f"left out: {problem}")
    if not sources:
        raise NothingToDoError("nothing to measure: no known task was named")
    return sources, problems


def _no_task(name: str) -> str:
    return f"no task {name!r}; there are: {', '.join((AGENTS, *GROUPS, *TASKS))}"


def _agents(most: int, acceptance: bool) -> Iterator[suite.Source]:
    found = agents.items(most, acceptance)
    if found:
        yield suite.Source(Cell(AGENTS, most), lambda number: found[number % len(found)], 0, len(found))


def _sessions(options: Options) -> dict[str, str]:
    """Return which sessions were run: a folder holds results of one kind."""
    return {"sessions": "acceptance" if options.acceptance else "development"} if AGENTS in options.tasks else {}


def _corpus(sources: Sequence[suite.Source]) -> dict[str, str]:
    """Return the description of the real text if a task uses it. Other text makes other items."""
    on_real_text = REAL | CODE_QA | PLACE_TASKS | ORDER_TASKS
    return {"corpus": corpus.described()} if any(source.cell.task in on_real_text for source in sources) else {}


class _Progress:
    """A reporter of one line per skipped item and one per complete cell."""

    def __init__(self, tell: Tell, total: int) -> None:
        self._tell = tell
        self._total = total
        self._done = 0
        self._cell: Cell | None = None

    def __call__(self, record: Record) -> None:
        self._done += 1
        if record.skipped is not None:
            self._tell(f"skipped: {record.cell.task}, number {record.number}: {record.skipped}")
        if record.cell != self._cell or self._done == self._total:
            self._cell = record.cell
            self._tell(f"{self._done} of {self._total}: {record.cell.task} at {record.cell.length} tokens")


def _write(options: Options, report: dict[str, Any], tell: Tell) -> None:
    table = markdown(report)
    tell(table)
    if options.out is None:
        return
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (options.out / "report.md").write_text(table + "\n", encoding="utf-8")
