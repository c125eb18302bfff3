"""A limit on the nesting of JSON, in a body and in texts within it: what reads it again or writes it recurses."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

DEEPEST = 250  # levels; a value may be written again, a little deeper, and orjson writes at most 254 levels
_CONTAINERS = (list, dict)


def is_too_deep(value: Any) -> bool:
    """Return whether a JSON value has more than DEEPEST levels of arrays and objects."""
    return next(islice(_levels(value), DEEPEST, None), None) is not None


def loads(text: str) -> Any:
    """Return the JSON value that a text within a body, or within an answer, holds.

    Raises:
        orjson.JSONDecodeError: it is not JSON, or nested too deeply.
    """
    value = orjson.loads(text)
    if is_too_deep(value):
        raise orjson.JSONDecodeError(f"nested too deeply: more than {DEEPEST} levels", text, 0)
    return value


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the arrays and objects of each level of nesting, from the outside in."""
    level = [value] if type(value) in _CONTAINERS else []
    while level:
        yield level
        level = [
            inner
            for container in level
            for inner in (container.values() if isinstance(container, dict) else container)
            if type(inner) in _CONTAINERS
        ]
