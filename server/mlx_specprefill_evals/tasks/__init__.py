"""The table of tasks."""

from .adversarial import ADVERSARIAL
from .base import Item, Known, Space, Task, make_item
from .calls import CALLS
from .more import MORE
from .real import REAL
from .ruler import RULER

TASKS: dict[str, Task] = RULER | ADVERSARIAL | MORE | REAL | CALLS
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": tuple(RULER),
    "adversarial": tuple(ADVERSARIAL),
    "more": tuple(MORE),
    "real": tuple(REAL),
    "tools": ("tool_choice", *CALLS),
    "all": tuple(TASKS),
}

__all__ = ["CALLS", "GROUPS", "REAL", "TASKS", "Item", "Known", "Space", "Task", "make_item"]
