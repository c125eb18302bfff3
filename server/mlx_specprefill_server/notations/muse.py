"""Muse's messages: each has a header that names whom it is for. Calls are tags in messages to the function."""

from __future__ import annotations

from ..parsers.tag_calls import tag_reader
from .declaration import Notation
from .minimax import TAGS as MINIMAX

# before a message's header, in the header, and behind the message
START, MESSAGE, END = "<|start|>assistant", "<|message|>", "<|eom|>"
TAGS = MINIMAX._replace(
    call="<atem:function_calls>", end_call="</atem:function_calls>",
    function='<atem:invoke name="', end_function="</atem:invoke>",
    parameter='<atem:parameter name="', end_parameter="</atem:parameter>",
)  # fmt: skip
MUSE = Notation(
    marks=((TAGS.call,),),
    readers={TAGS.call: tag_reader(TAGS)},
    think=(f"to=self{MESSAGE}", END),
    again=True,
    around=(START, *(f"to={name}{MESSAGE}" for name in ("user", "commentary"))),
    recipients=lambda tools: [f"to={name}{MESSAGE}" for name in tools.parameters],
)
