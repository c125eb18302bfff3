"""Calls of LFM2, written as in Python: [f(x=1, y="text")]."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from ..deltas import CallDelta
from ..notations import END_LFM2, LFM2
from .base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from .calls import call, declared, expect, until
from .json_text import JsonReader

NOT_IN_NAMES = "()[]{}\"',\n"


def read_python_calls(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read a list of calls."""
    yield from expect(cursor, LFM2)
    yield from spaces(cursor)
    yield from skip(cursor, "[")
    while True:
        yield from spaces(cursor)
        name = tools.name((yield from until(cursor, "(", never=NOT_IN_NAMES[1:])))
        yield from call(name, _arguments(cursor, tools.places(name)))
        yield from spaces(cursor)
        if not (yield from skip(cursor, ",")):
            break
    yield from skip(cursor, "]")
    yield from spaces(cursor)
    yield from skip(cursor, END_LFM2)


def _arguments(cursor: Cursor, known: Iterable[str]) -> Reading[None]:
    yield from expect(cursor, "(")
    before = "{"
    while not (yield from _closes(cursor)):
        name = yield from declared(cursor, known, "=")
        if not name:
            name = (yield from until(cursor, "=", never=NOT_IN_NAMES)).strip()
            yield from expect(cursor, "=")
        yield from spaces(cursor)
        yield from JsonReader(cursor, before=f"{before}{orjson.dumps(name).decode()}: ").value()
        before = ", "
        yield from spaces(cursor)
        if not (yield from skip(cursor, ",")) and not (yield from starts_with(cursor, (")",))):
            raise MalformedError("',' or ')' is expected")
    yield CallDelta("{}" if before == "{" else "}")


def _closes(cursor: Cursor) -> Reading[bool]:
    yield from spaces(cursor)
    return bool((yield from skip(cursor, ")")))
