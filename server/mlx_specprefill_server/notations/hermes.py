"""Hermes', Qwen's and many others' calls: JSON between tags."""

from __future__ import annotations

import json

from ..parsers.base import Cursor, Reading, Tools, skip, spaces, starts_with
from ..parsers.call_parts import CALL, END_CALL, FENCE, fence
from ..parsers.json_calls import read_calls
from ..parsers.tag_calls import XML, read_functions
from .declaration import Notation
from .glm import read_glm_body


def read_tool_call(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read `<tool_call>` with any of three notations inside. Models fall back to the one they saw most."""
    cursor.take(len(CALL))
    yield from spaces(cursor)
    fenced = yield from fence(cursor)
    match (yield from starts_with(cursor, ("{", "[", XML.function))):
        case "{" | "[":
            yield from read_calls(cursor, tools, (END_CALL,))
        case "<function=":
            yield from read_functions(cursor, tools)
        case _:
            yield from read_glm_body(cursor, tools)
    yield from spaces(cursor)
    if fenced and (yield from skip(cursor, FENCE)):
        yield from spaces(cursor)
    yield from skip(cursor, END_CALL)


HERMES = Notation(
    marks=((CALL,),),
    begun=(CALL, END_CALL),
    # NousResearch's Hermes function calling, which SmolLM3 follows
    history=lambda calls: "\n".join(f"{CALL}\n{json.dumps(call, ensure_ascii=False)}\n{END_CALL}" for call in calls),
    history_mark=CALL,
)
