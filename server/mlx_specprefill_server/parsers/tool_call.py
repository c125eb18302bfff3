"""The tag that most families share, with any of the three ways to write a call inside it."""

from __future__ import annotations

from . import glm, hermes, xml
from .cursor import Cursor, spaces, starts_with
from .events import Reading, Tools

__all__ = ["TAG", "read_tag"]

TAG, END = "<tool_call>", "</tool_call>"


def read_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Whatever is inside decides how it is read: models fall back into the format that they saw most."""
    cursor.take(len(TAG))
    yield from spaces(cursor)
    match (yield from starts_with(cursor, ("{", "[", xml.FUNCTION))):
        case "{" | "[":
            yield from hermes.read_calls(cursor, tools, (END,))
        case xml.FUNCTION:
            yield from xml.read_functions(cursor, tools)
        case _:
            yield from glm.read_body(cursor, tools)
    yield from spaces(cursor)
    if (yield from starts_with(cursor, (END,))):
        cursor.take(len(END))
