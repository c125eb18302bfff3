"""The marks of each notation of calls. Parsers read them, and grammars write them."""

from __future__ import annotations

import re
from typing import NamedTuple

NAME = re.compile(r"[\w.:/-]{1,256}")  # of a tool

MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# opening mark, end mark, the mark around texts
GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
END_PARAMETER = "</parameter>"


class Tags(NamedTuple):
    """The tags of a notation with one tag per argument.

    Attributes:
        close: what ends the name in an opening tag.
        lines: values stand on lines of their own.
    """

    call: str
    end_call: str
    function: str
    end_function: str
    parameter: str
    close: str
    lines: bool


XML = Tags(CALL, END_CALL, "<function=", "</function>", "<parameter=", ">", lines=True)
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">', lines=False
)
