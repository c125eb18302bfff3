"""Granite's calls: an array behind a mark. Phi-4's mark has an end."""

from __future__ import annotations

import json

from ..parsers.call_parts import CALL, END_CALL
from ..parsers.json_calls import between_reader
from .declaration import OBJECT, Notation, Written

MARK, END_MARK = "<|tool_call|>", "<|/tool_call|>"
GRANITE = Notation(
    marks=((MARK,),),
    readers={MARK: between_reader(MARK, END_MARK), CALL: between_reader(CALL, END_CALL)},
    written=(Written(OBJECT, ", ", f"{MARK}[", "]"),),
    # "Function calling" in IBM's documentation of Granite 3.3
    history=lambda calls: f"{MARK}{json.dumps(calls, ensure_ascii=False)}",
    history_mark=MARK,
)
