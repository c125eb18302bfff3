"""The table of tasks."""

from .adversarial import ADVERSARIAL
from .base import Item, Space, Task, make_item
from .more import MORE
from .ruler import RULER

TASKS: dict[str, Task] = RULER | ADVERSARIAL | MORE
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(RULER),
    "adversarial": tuple(ADVERSARIAL),
    "more": tuple(MORE),
    "all": tuple(TASKS),
}

__all__ = ["GROUPS", "TASKS", "Item", "Space", "Task", "make_item"]
