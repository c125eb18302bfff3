"""Calls written as in Python: [f(x=1, y="text")]. LFM2, Llama 3.2 and 4, OLMo 3."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from ..deltas import CallDelta
from .base import Cursor, MalformedError, Reading, Tools, peek, skip, spaces, starts_with
from .calls import call, declared, expect, until
from .json_text import JsonReader

NOT_IN_NAMES = "()[]{}\"',\n"
METHOD = ".call"  # of Llama 3's own tools


def read_python_calls(cursor: Cursor, tools: Tools, known: bool) -> Reading[None]:
    """Read calls, in a list or one behind another; with `known` of known tools only."""
    listed = yield from skip(cursor, "[")
    goes_on = True
    while goes_on:
        yield from spaces(cursor)
        raw = (yield from until(cursor, "(", never=NOT_IN_NAMES[1:])).strip()
        name = tools.name(raw if raw in tools else raw.removesuffix(METHOD))
        if known and name not in tools:
            raise MalformedError("no such tool")
        yield from call(name, _arguments(cursor, tools.places(name)))
        yield from spaces(cursor)
        goes_on = bool((yield from skip(cursor, ","))) or not (listed or (yield from _ends(cursor)))
    if listed:
        yield from skip(cursor, "]")


def _ends(cursor: Cursor) -> Reading[bool]:
    """Return whether no further name begins here."""
    return not (yield from peek(cursor, 1)).isidentifier()


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
