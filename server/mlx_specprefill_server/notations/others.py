"""The marks of families that need no declaration: behind them no other text is a call of a known tool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ..parsers.base import Tools
from ..parsers.call_parts import CALL, CallReader
from ..parsers.json_calls import between_reader, read_bare
from ..parsers.tag_calls import XML, Tags, read_functions, tag_reader
from ..parsers.tagged import Bare
from .granite import END_MARK, MARK
from .hermes import read_tool_call

PYTHON_TAG = "<|python_tag|>"  # of Llama 3, without an end
# The marks around calls as JSON that one family or few have.
JSON_MARKS: Mapping[str, str] = {
    "<TOOLCALL>": "</TOOLCALL>",  # Nemotron
    "<tool_calls>": "</tool_calls>",  # Hunyuan, MiniMax M1, Jamba, Apriel
    "<|tools_prefix|>": "<|tools_suffix|>",  # Apertus
    "<|action_start|><|plugin|>": "<|action_end|>",  # InternLM
    "<|function_call|>": "",  # GigaChat 3.1
    "<|message_sep|>\n\nfunction call<|role_sep|>": "",  # GigaChat 3
    "<function_call>": "",  # Granite 20B
    "functools": "",  # Phi-4-mini
    "Action:": "",  # Command R+, before a fence
    MARK: END_MARK,  # Phi-4-mini, also
}
# The marks around calls as in Python. Llama 4, OLMo 3 and Gemma 3.
PYTHON_MARKS: Mapping[str, str] = {
    "<|python_start|>": "<|python_end|>",
    "<function_calls>": "</function_calls>",
    "```tool_code": "```",
}
STEP = Tags(  # Step 3
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
    '<steptml:invoke name="', "</steptml:invoke>",
    '<steptml:parameter name="', '">', lines=False, end_parameter="</steptml:parameter>",
    beside=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
)  # fmt: skip
# Calls without a tag.
BARE = Bare(read_bare, ("{", "["), ('[{"name"', '{"name"', '{"tool_calls"'))
EXAMPLE = "[func_name1("  # in the templates of Llama 3.2 and 4 and ToolACE, for calls as in Python


@cache
def other_readers() -> Mapping[str, CallReader]:
    """Return the readers of marks that need no format: behind them no other text is a call of a known tool."""
    python = {**PYTHON_MARKS, PYTHON_TAG: ""}
    return {STEP.call: tag_reader(STEP)} | {
        begin: between_reader(begin, end, known=begin != PYTHON_TAG, python=begin in python)
        for begin, end in {**JSON_MARKS, **python}.items()
    }


def any_readers(tools: Tools) -> tuple[dict[str, CallReader], Bare]:
    """Return the readers for a model whose notation is unknown, or one of those that models fall back to."""
    lists = (f"[{name}(" for name in tools.parameters)
    bare = BARE._replace(anywhere=(*BARE.anywhere, *lists))
    return {CALL: read_tool_call, XML.function: read_functions, **other_readers()}, bare
