"""GLM's calls: a tag for each name and value, without quotes."""

from __future__ import annotations

from ..parsers.base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from ..parsers.call_parts import CALL, END_CALL, call, declared, expect, until
from ..parsers.json_text import JsonReader
from ..parsers.values import Members, Value
from .declaration import Notation, Written

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ENDS = {END_VALUE: (KEY, END_CALL, CALL), END_CALL: (CALL,)}  # of a value


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
        yield from members.add(key, Value(cursor, END_VALUE, ENDS))
        yield from spaces(cursor)
    if not (yield from starts_with(cursor, (END_CALL,))) and (cursor.buffer or not cursor.complete):
        raise MalformedError("a key is expected")
    yield from members.close()


GLM = Notation(
    marks=((CALL, KEY),),
    text=Written(
        f"{CALL}{{name}}{{line}}{KEY}input{END_KEY}{{line}}{VALUE}{{input}}{END_VALUE}{{line}}{END_CALL}",
        excluded=(END_VALUE, END_CALL),
    ),
    begun=(CALL, END_CALL),
    marked=True,  # the marks of arguments are tokens, too
)
