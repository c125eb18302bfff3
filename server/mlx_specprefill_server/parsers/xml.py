"""Calls as tags, one for each parameter, with unquoted values: Qwen3-Coder, Qwen3.5, Nemotron-3."""

from __future__ import annotations

from .calls import Members, Value, call, expect, until
from .parser import Cursor, MalformedError, Reading, Tools, spaces, starts_with

__all__ = ["FUNCTION", "read_function", "read_functions"]

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER, CALL, END_CALL = "</function>", "</parameter>", "<tool_call>", "</tool_call>"
AFTER_PARAMETER = (PARAMETER, END_FUNCTION, END_CALL, FUNCTION, CALL)
AFTER_FUNCTION = (END_CALL, FUNCTION, CALL)


def read_functions(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read one or more functions and the end tag around them. Models sometimes omit either tag."""
    while (yield from starts_with(cursor, (FUNCTION,))):
        yield from read_function(cursor, tools)
        yield from spaces(cursor)
    if (yield from starts_with(cursor, (END_CALL,))):
        cursor.take(len(END_CALL))


def read_function(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read one function."""
    yield from expect(cursor, FUNCTION)
    name = tools.name((yield from _name(cursor)))
    yield from call(name, _arguments(cursor, tools, name))


def _arguments(cursor: Cursor, tools: Tools, name: str) -> Reading[None]:
    members = Members(tools, name)
    others: dict[str, tuple[str, ...] | None] = {END_FUNCTION: AFTER_FUNCTION, END_CALL: (CALL,)}
    others |= {f"\n{PARAMETER}{known}>": None for known in tools.properties.get(name, {})}
    while True:
        yield from spaces(cursor)
        match (yield from starts_with(cursor, (PARAMETER, END_FUNCTION, END_CALL))):
            case "<parameter=":
                cursor.take(len(PARAMETER))
                key = yield from _name(cursor)
                yield from members.add(key, Value(cursor, END_PARAMETER, AFTER_PARAMETER, others, lines=True))
            case "</function>":
                cursor.take(len(END_FUNCTION))
                break
            case "</tool_call>":
                break
            case _:
                if cursor.buffer or not cursor.complete:
                    raise MalformedError("a parameter is expected")
                break
    yield from members.close()


def _name(cursor: Cursor) -> Reading[str]:
    """Return the name after "=", without quotes. Models sometimes omit the ">"."""
    name = yield from until(cursor, ">\n", never='{}[]"')
    if cursor.buffer[0] == ">":
        cursor.take(1)
    if not name.strip():
        raise MalformedError("no name")
    return name.strip()
