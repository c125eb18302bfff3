"""Calls as tags with unquoted values: GLM, MiniMax M2, Qwen3-Coder, Qwen3.5, Nemotron-3."""

from __future__ import annotations

from ..notations import CALL, END_CALL, END_KEY, END_PARAMETER, END_VALUE, KEY, MINIMAX, VALUE, XML, Tags
from .base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from .calls import call, declared, expect, until
from .json_text import JsonReader
from .values import Members, Value


def read_glm_body(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a call after its tag. The name must be a known tool: a bare name is hard to tell from text."""
    name = tools.name((yield from until(cursor, "\n<{", never=' "[')))
    if name not in tools:
        raise MalformedError("no such tool")
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("{",))):
        yield from call(name, JsonReader(cursor, (END_CALL,)).object())
    else:
        yield from call(name, _glm_arguments(cursor, tools, name))


def _glm_arguments(cursor: Cursor, tools: Tools, name: str) -> Reading[None]:
    places = tools.places(name)
    members = Members(places)
    while (yield from skip(cursor, KEY)):
        key = yield from declared(cursor, places, END_KEY)
        if not key:
            key = (yield from until(cursor, "<")).strip()
            yield from expect(cursor, END_KEY)
        yield from spaces(cursor)
        yield from expect(cursor, VALUE)
        value = Value(cursor, END_VALUE, (KEY, END_CALL, CALL), {END_CALL: (CALL,)})
        yield from members.add(key, value)
        yield from spaces(cursor)
    if not (yield from starts_with(cursor, (END_CALL,))) and (cursor.buffer or not cursor.complete):
        raise MalformedError("a key is expected")
    yield from members.close()


def read_minimax(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls between MiniMax's tags."""
    yield from expect(cursor, MINIMAX.call)
    yield from spaces(cursor)
    yield from read_functions(cursor, tools, MINIMAX)


def read_functions(cursor: Cursor, tools: Tools, tags: Tags = XML) -> Reading[None]:
    """Read one or more functions and the end tag around them. Models sometimes omit either tag."""
    if not (yield from starts_with(cursor, (tags.function,))):
        raise MalformedError("a function is expected")
    while (yield from skip(cursor, tags.function)):
        name = tools.name((yield from _name(cursor, tags)))
        yield from call(name, _arguments(cursor, tools, name, tags))
        yield from spaces(cursor)
    yield from skip(cursor, tags.end_call)


def _arguments(cursor: Cursor, tools: Tools, name: str, tags: Tags) -> Reading[None]:
    places = tools.places(name)
    members = Members(places)
    others = {
        tags.end_function: (tags.end_call, tags.function, tags.call),
        tags.end_call: (tags.call,),
        f"\n{tags.parameter}": tuple(f"{known}{tags.close}" for known in places),
    }
    followers = (tags.parameter, tags.end_function, tags.end_call, tags.function, tags.call)
    yield from spaces(cursor)
    while (yield from skip(cursor, tags.parameter)):
        key = (yield from declared(cursor, places, tags.close)) or (yield from _name(cursor, tags))
        yield from members.add(key, Value(cursor, END_PARAMETER, followers, others, tags.lines))
        yield from spaces(cursor)
    ended = (yield from skip(cursor, tags.end_function)) or (yield from starts_with(cursor, (tags.end_call,)))
    if not ended and (cursor.buffer or not cursor.complete):
        raise MalformedError("a parameter is expected")
    yield from members.close()


def _name(cursor: Cursor, tags: Tags) -> Reading[str]:
    """Return the name in an opening tag, without quotes. Models sometimes omit what closes the tag."""
    name = yield from until(cursor, f"{tags.close[0]}\n")
    yield from skip(cursor, tags.close)
    if not name.strip():
        raise MalformedError("no name")
    return name.strip().strip('"')
