"""The marks of each notation of calls. Parsers read them, and grammars write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

NAME = re.compile(r"[\w.:/-]{1,256}")  # of a tool

MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")  # before a header, in it, and behind it
# opening mark, end mark, the mark around texts
GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

GRANITE, END_GRANITE = "<|tool_call|>", "<|/tool_call|>"  # Phi-4's has an end
COMMAND, END_COMMAND = "<|START_ACTION|>", "<|END_ACTION|>"
LFM2, END_LFM2 = "<|tool_call_start|>", "<|tool_call_end|>"
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
    GRANITE: END_GRANITE,  # Phi-4-mini, also
}
# The marks around calls as in Python. Llama 4, OLMo 3 and Gemma 3.
PYTHON_MARKS: Mapping[str, str] = {
    "<|python_start|>": "<|python_end|>",
    "<function_calls>": "</function_calls>",
    "```tool_code": "```",
}

CALL, END_CALL = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
END_PARAMETER = "</parameter>"
DSML_4 = ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")  # around the calls of DeepSeek V4


class Marks(NamedTuple):
    """The marks of a notation with a name and JSON: around all calls, around each, and before its arguments."""

    section: str
    end_section: str
    call: str
    end_call: str
    arguments: str


KIMI = Marks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)


class Tags(NamedTuple):
    """The tags of a notation with one tag per argument.

    Attributes:
        close: what ends the name in the tag of a function, and in that of a parameter without `kinds`.
        lines: values stand on lines of their own.
        kinds: what follows the quoted name of a parameter before a text, and before JSON; none: the schema tells.
        beside: marks before and behind a function that say nothing.
    """

    call: str
    end_call: str
    function: str
    end_function: str
    parameter: str
    close: str
    lines: bool
    end_parameter: str = END_PARAMETER
    kinds: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def end_name(self) -> str:
        """The end of the name in the tag of a parameter."""
        return '"' if self.kinds else self.close


XML = Tags(CALL, END_CALL, "<function=", "</function>", "<parameter=", ">", lines=True)
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">', lines=False
)
SEED = XML._replace(call="<seed:tool_call>", end_call="</seed:tool_call>")
DSML = Tags(  # DeepSeek V3.2
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="', '">', lines=False,
    end_parameter="</｜DSML｜parameter>", kinds=(' string="true">', ' string="false">'),
)  # fmt: skip
STEP = Tags(  # Step 3
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
    '<steptml:invoke name="', "</steptml:invoke>",
    '<steptml:parameter name="', '">', lines=False, end_parameter="</steptml:parameter>",
    beside=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
)  # fmt: skip
