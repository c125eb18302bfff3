"""Calls as tags with unquoted values: GLM, Qwen3-Coder, Qwen3.5, Nemotron-3."""

from __future__ import annotations

from .base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from .calls import Members, Value, call, expect, until
from .json_text import JsonReader

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def read_glm_body(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a call after its tag. The name must be a known tool: a bare name is hard to tell from text."""
    name = tools.name((yield from until(cursor, "\n<{", never=' "[')))
    if name not in tools.properties:
        raise MalformedError("no such tool")
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("{",))):
        yield from call(name, JsonReader(cursor, (END_CALL,)).object())
    else:
        yield from call(name, _glm_arguments(cursor, tools, name))


def _glm_arguments(cursor: Cursor, tools: Tools, name: str) -> Reading[None]:
    members = Members(tools, name)
    while (yield from skip(cursor, KEY)):
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


FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
AFTER_PARAMETER = (PARAMETER, END_FUNCTION, END_CALL, FUNCTION, CALL)
AFTER_FUNCTION = (END_CALL, FUNCTION, CALL)


def read_functions(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read one or more functions and the end tag around them. Models sometimes omit either tag."""
    while (yield from skip(cursor, FUNCTION)):
        name = tools.name((yield from _name(cursor)))
        yield from call(name, _arguments(cursor, tools, name))
        yield from spaces(cursor)
    yield from skip(cursor, END_CALL)


def _arguments(cursor: Cursor, tools: Tools, name: str) -> Reading[None]:
    members = Members(tools, name)
    others: dict[str, tuple[str, ...] | None] = {END_FUNCTION: AFTER_FUNCTION, END_CALL: (CALL,)}
    others |= {f"\n{PARAMETER}{known}>": None for known in tools.properties.get(name, {})}
    yield from spaces(cursor)
    while (yield from skip(cursor, PARAMETER)):
        key = yield from _name(cursor)
        yield from members.add(key, Value(cursor, END_PARAMETER, AFTER_PARAMETER, others, lines=True))
        yield from spaces(cursor)
    ended = (yield from skip(cursor, END_FUNCTION)) or (yield from starts_with(cursor, (END_CALL,)))
    if not ended and (cursor.buffer or not cursor.complete):
        raise MalformedError("a parameter is expected")
    yield from members.close()


def _name(cursor: Cursor) -> Reading[str]:
    """Return the name after "=", without quotes. Models sometimes omit the ">"."""
    name = yield from until(cursor, ">\n", never='{}[]"')
    if cursor.buffer[0] == ">":
        cursor.take(1)
    if not name.strip():
        raise MalformedError("no name")
    return name.strip()
