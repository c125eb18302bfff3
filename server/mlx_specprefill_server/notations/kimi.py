"""Kimi K2's calls: an id that names the function, and JSON, between marks."""

from __future__ import annotations

from ..parsers.marked_calls import Marks, marked_reader
from .declaration import Notation, Written

MARKS = Marks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
CALL = f"{MARKS.call}functions.{{name}}:{{number}}{MARKS.arguments}{{arguments}}{MARKS.end_call}"
KIMI = Notation(
    marks=((MARKS.section,),),
    readers=dict.fromkeys((MARKS.section, MARKS.call), marked_reader(MARKS)),
    written=(Written(CALL, "", MARKS.section, MARKS.end_section),),
    begun=(MARKS.call, MARKS.arguments),
    marked=True,
)
