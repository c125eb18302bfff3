"""Mistral's calls: a name and JSON behind a mark, or an array."""

from __future__ import annotations

import re

from ..parsers.base import NAME, Cursor, Reading, Tools, peek, skip, spaces, starts_with
from ..parsers.call_parts import CallReader, call, expect, until
from ..parsers.json_calls import read_calls
from ..parsers.json_text import JsonReader
from .declaration import OBJECT, Notation, Written

SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # of a call
TAG, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral_tag(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls behind one mark."""
    cursor.take(len(TAG))
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("[", "{"))):
        yield from read_calls(cursor, tools)
        return
    while True:
        name = tools.name((yield from until(cursor, "[{", never=' "<\n')))
        given = (yield from until(cursor, "[{")) if (yield from skip(cursor, CALL_ID)) else ""
        yield from skip(cursor, ARGUMENTS)
        yield from spaces(cursor)
        yield from call(name, JsonReader(cursor).object(), given if SHORT_ID.fullmatch(given) else "")
        yield from spaces(cursor)
        if not NAME.match((yield from peek(cursor, 1))):
            return


def named_mistral_readers(tools: Tools) -> dict[str, CallReader]:
    """Return readers of calls whose tool's name stands before the mark, as Devstral sometimes writes them."""

    def reader(name: str) -> CallReader:
        def read(cursor: Cursor, _: Tools) -> Reading[None]:
            yield from expect(cursor, f"{name}{TAG}")
            yield from skip(cursor, ARGUMENTS)
            yield from call(name, JsonReader(cursor).object())

        return read

    return {f"{name}{TAG}": reader(name) for name in tools.parameters}


MISTRAL = Notation(
    marks=((TAG,),),
    readers={TAG: read_mistral_tag},
    named=named_mistral_readers,
    think=("[THINK]", "[/THINK]"),
    written=(
        Written(f"{TAG}{{name}}{{id}}{ARGUMENTS}{{arguments}}", needs=ARGUMENTS),
        Written(OBJECT, ", ", f"{TAG}{{space}}[", "]"),
    ),
    begun=(TAG, ARGUMENTS),
    marked=True,
)
