"""Command's calls: an array of objects with numbers, between marks."""

from __future__ import annotations

from ..parsers.json_calls import between_reader
from .declaration import Notation, Written

MARK, END_MARK = "<|START_ACTION|>", "<|END_ACTION|>"
CALL = '    {"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}'
COMMAND = Notation(
    marks=((MARK,),),
    readers={MARK: between_reader(MARK, END_MARK)},
    think=("<|START_THINKING|>", "<|END_THINKING|>"),
    again=True,
    around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    written=(Written(CALL, ",\n", f"{MARK}[\n", f"\n]{END_MARK}"),),
)
