"""The table of tasks."""

from .base import Item, Known, Space, Task, make_item
from .code_qa import CODE_QA
from .more import MORE
from .places import tasks_at_places
from .real import REAL
from .ruler import RULER

PLACE_TASKS = tasks_at_places("place")
ORDER_TASKS = tasks_at_places("order", order=True)
TASKS: dict[str, Task] = RULER | MORE | REAL | CODE_QA | PLACE_TASKS | ORDER_TASKS
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(RULER),
    "real": tuple(REAL),
    "places": tuple(PLACE_TASKS),
    "orders": tuple(ORDER_TASKS),
    "public": ("needle", "quote", "paraphrase", "code_qa", "tool_choice"),
    "all": tuple(TASKS),
}

__all__ = [
    "CODE_QA",
    "GROUPS",
    "ORDER_TASKS",
    "PLACE_TASKS",
    "REAL",
    "TASKS",
    "Item",
    "Known",
    "Space",
    "Task",
    "make_item",
]
