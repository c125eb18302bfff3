"""MiniMax M2's calls, in tags of its own."""

from __future__ import annotations

from ..parsers.tag_calls import Tags, tag_reader
from .declaration import Notation, one_text

TAGS = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">', lines=False
)
MINIMAX = Notation(
    marks=((TAGS.call,),),
    readers={TAGS.call: tag_reader(TAGS)},
    think=("<mm:think>", "</mm:think>"),
    text=one_text(TAGS),
    begun=(TAGS.call, TAGS.end_call),
)
