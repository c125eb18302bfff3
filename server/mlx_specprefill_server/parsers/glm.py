"""Calls as a name and pairs of key and value tags: GLM."""

from __future__ import annotations

from .calls import Members, Value, call, expect, until
from .json_text import JsonReader
from .parser import Cursor, MalformedError, Reading, Tools, spaces, starts_with

__all__ = ["read_body"]

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def read_body(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a call after its tag. The name must be a known tool: a bare name is hard to tell from text."""
    name = tools.name((yield from until(cursor, "\n<{", never=' "[')))
    if name not in tools.properties:
        raise MalformedError("no such tool")
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("{",))):
        yield from call(name, JsonReader(cursor, (END_CALL,)).object())
    else:
        yield from call(name, _arguments(cursor, tools, name))


def _arguments(cursor: Cursor, tools: Tools, name: str) -> Reading[None]:
    members = Members(tools, name)
    while (yield from starts_with(cursor, (KEY,))):
        cursor.take(len(KEY))
        key = yield from until(cursor, "<")
        yield from expect(cursor, END_KEY)
        yield from spaces(cursor)
        yield from expect(cursor, VALUE)
        value = Value(cursor, END_VALUE, (KEY, END_CALL, CALL), {END_CALL: (CALL,)})
        yield from members.add(key.strip(), value)
        yield from spaces(cursor)
    if not (yield from starts_with(cursor, (END_CALL,))) and (cursor.buffer or not cursor.complete):
        raise MalformedError("a key is expected")
    yield from members.close()
