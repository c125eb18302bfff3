"""Calls of Kimi K2, between marks: a name with a number, then JSON."""

from __future__ import annotations

import re

from .base import Cursor, Reading, Tools, skip, spaces
from .calls import call, expect, until
from .json_text import JsonReader

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
NUMBER = re.compile(r":\d+\s*$", re.ASCII)


def read_kimi(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read all calls of a section. Models sometimes omit the marks around it."""
    yield from skip(cursor, SECTION)
    yield from spaces(cursor)
    yield from expect(cursor, CALL)
    while True:
        name = tools.name(NUMBER.sub("", (yield from until(cursor, "<"))).strip().removeprefix("functions."))
        yield from expect(cursor, ARGUMENTS)
        yield from spaces(cursor)
        yield from call(name, JsonReader(cursor, (END_CALL, END_SECTION)).object())
        yield from spaces(cursor)
        yield from skip(cursor, END_CALL)
        yield from spaces(cursor)
        if not (yield from skip(cursor, CALL)):
            break
    yield from skip(cursor, END_SECTION)
