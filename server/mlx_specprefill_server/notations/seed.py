"""Seed's calls, in tags of its own."""

from __future__ import annotations

from ..parsers.tag_calls import XML, tag_reader
from .declaration import Notation, one_text

TAGS = XML._replace(call="<seed:tool_call>", end_call="</seed:tool_call>", lines=False)
SEED = Notation(
    marks=((TAGS.call,),),
    readers={TAGS.call: tag_reader(TAGS)},
    think=("<seed:think>", "</seed:think>"),
    text=one_text(TAGS),
    begun=(TAGS.call, TAGS.end_call),
)
