"""Calls of Kimi K2 and DeepSeek V3, between marks: a name, then JSON."""

from __future__ import annotations

import re
from typing import NamedTuple

from .base import Cursor, Reading, Tools, skip, spaces, starts_with
from .call_parts import FENCE, CallReader, call, expect, fence, until
from .json_text import JsonReader

NUMBER = re.compile(r":\d+\s*$", re.ASCII)


class Marks(NamedTuple):
    """The marks of a notation with a name and JSON: around all calls, around each, and before its arguments."""

    section: str
    end_section: str
    call: str
    end_call: str
    arguments: str


def marked_reader(marks: Marks) -> CallReader:
    """Return a reader of all calls of a section. Models sometimes omit the marks around it."""

    def read(cursor: Cursor, tools: Tools) -> Reading[None]:
        yield from skip(cursor, marks.section)
        yield from spaces(cursor)
        yield from expect(cursor, marks.call)
        while True:
            name = tools.name((yield from _name(cursor, marks)).removeprefix("functions."))
            yield from call(name, JsonReader(cursor, (marks.end_call, marks.end_section)).object())
            yield from spaces(cursor)
            if (yield from skip(cursor, FENCE)):
                yield from spaces(cursor)
            yield from skip(cursor, marks.end_call)
            yield from spaces(cursor)
            if not (yield from skip(cursor, marks.call)):
                break
        yield from skip(cursor, marks.end_section)

    return read


def _name(cursor: Cursor, marks: Marks) -> Reading[str]:
    """Read the name, and what stands before the arguments. DeepSeek's first models write a kind before the name, and
    put the arguments into a fence: function<｜tool▁sep｜>name, and a fence on the next line.
    """
    name = yield from until(cursor, "<")
    yield from expect(cursor, marks.arguments)
    yield from spaces(cursor)
    if not (yield from starts_with(cursor, ("{",))):
        name = (yield from until(cursor, "\n`{")) or name
        yield from spaces(cursor)
        yield from fence(cursor)
    return NUMBER.sub("", name).strip()
