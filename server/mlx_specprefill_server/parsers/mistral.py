"""Calls behind a mark without an end: Mistral, old (a JSON array) and new (name, mark, arguments)."""

from __future__ import annotations

from .calls import call, until
from .hermes import read_calls
from .json_text import JsonReader
from .parser import Cursor, Reading, Tools, spaces, starts_with

__all__ = ["TAG", "read_tag"]

TAG, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls behind one mark."""
    cursor.take(len(TAG))
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("[", "{"))):
        yield from read_calls(cursor, tools)
        return
    while True:
        name = tools.name((yield from until(cursor, "[{", never=' "<\n')))
        if (yield from starts_with(cursor, (CALL_ID,))):
            cursor.take(len(CALL_ID))
            yield from until(cursor, "[{")
        if (yield from starts_with(cursor, (ARGUMENTS,))):
            cursor.take(len(ARGUMENTS))
        yield from spaces(cursor)
        yield from call(name, JsonReader(cursor).object())
        yield from spaces(cursor)
        if not cursor.buffer or (yield from starts_with(cursor, (TAG,))):
            return
