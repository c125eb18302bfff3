"""The run: every cell's items through every arm. A failed item does not end it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .arms import Arm
from .errors import NotMeasuredError, UnreachableError
from .model_under_test import ModelUnderTest, Reply
from .records import Cell, Record, Records
from .tasks import GROUPS, TASKS, Item, Space, make_item

log = logging.getLogger(__name__)
GIVE_UP_AFTER = 3  # items in a row that nobody answered


@dataclass(frozen=True)
class Plan:
    """The size of a run: `number` items per cell through all arms."""

    arms: tuple[Arm, ...]
    number: int
    seed: int = 0


@dataclass(frozen=True)
class Source:
    """The items of one cell by number, and the longest answer."""

    cell: Cell
    get: Callable[[int], Item]
    answer_tokens: int
    size: int | None = None  # items there are; None: without end


def choose_tasks(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the table's tasks by name or group, and the names that are neither."""
    known = dict.fromkeys(task for name in names for task in GROUPS.get(name, (name,)) if task in TASKS)
    return list(known), [name for name in names if name not in GROUPS and name not in TASKS]


def synthetic(names: Sequence[str], lengths: Sequence[int], model: ModelUnderTest) -> Iterator[Source]:
    """Return the cells of the table's tasks."""
    for name in names:
        for length in lengths:
            yield _source(Cell(name, length), model)


def _source(cell: Cell, model: ModelUnderTest) -> Source:
    task = TASKS[cell.task]
    space = Space(cell.length, model.count)
    return Source(cell, lambda number: make_item(task, cell.task, number, space), task.answer_tokens)


def work(plan: Plan, sources: Sequence[Source], records: Records) -> Iterator[tuple[Cell, tuple[Arm, ...]]]:
    """Yield every item that `run` would ask, by its cell, with its missing arms."""
    for source in sources:
        for number in range(plan.seed, plan.seed + min(plan.number, source.size or plan.number)):
            if missing := _missing(plan, records.find(source.cell, number)):
                yield source.cell, missing


def run(
    plan: Plan, sources: Sequence[Source], model: ModelUnderTest, records: Records, tell: Callable[[Record], None]
) -> None:
    """Measure the items that `records` lacks, and report every item to `tell`.

    Raises:
        UnreachableError: no server answered several items in a row; the results so far are kept.
    """
    unanswered = 0
    for source in sources:
        for number in range(plan.seed, plan.seed + min(plan.number, source.size or plan.number)):
            record = records.find(source.cell, number)
            wanted = _missing(plan, record)
            if wanted:
                try:
                    record = _measured(plan, source, model, number, wanted)
                    unanswered = 0
                except NotMeasuredError as error:
                    unanswered = unanswered + 1 if isinstance(error, UnreachableError) else 0
                    record = Record(source.cell, number, skipped=str(error))
                records.add(record)
                if unanswered >= GIVE_UP_AFTER:
                    raise UnreachableError(f"{record.skipped}; the same command goes on from here")
            assert record is not None
            tell(record)


def _missing(plan: Plan, record: Record | None) -> tuple[Arm, ...]:
    if record is None:
        return plan.arms
    return tuple(arm for arm in plan.arms if arm.name not in record.arms)


def _measured(plan: Plan, source: Source, model: ModelUnderTest, number: int, wanted: Sequence[Arm]) -> Record:
    item = source.get(number)
    replies = model.ask(item, wanted, source.answer_tokens, number)
    arms = {arm.name: _entry(replies.get(arm), item) for arm in wanted}
    return Record(source.cell, number, arms, group=item.group)


def all_values(answer: str, values: Sequence[str]) -> float:
    """Return the share of the values that occur, in any case (RULER: string_match_all)."""
    text = answer.lower()
    return sum(value.lower() in text for value in values) / len(values)


def _entry(reply: Reply | None, item: Item) -> dict[str, object]:
    """Return a record's entry. One for an arm that does not apply, like gold chunks without gold, is empty."""
    if reply is None:
        return {}
    scored = all_values(reply.text, item.values) if reply.score is None else reply.score
    return {"score": scored, "answer": reply.text, "kept": reply.kept, **reply.measures}
