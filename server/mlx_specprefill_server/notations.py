"""The marks of each notation of calls. Parsers read them, and grammars write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .call_marks import Marks, Tags, Written

NAME = re.compile(r"[\w.:/-]{1,256}")  # of a tool

SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # Mistral's, of a call
MISTRAL_TAG, MISTRAL_ARGUMENTS, MISTRAL_CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")  # before a header, in it, and behind it
# Muse's: before a message's header, in the header, and behind the message
MUSE_START, MUSE_MESSAGE, MUSE_END = "<|start|>assistant", "<|message|>", "<|eom|>"
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
GLM_ENDS = {END_VALUE: (KEY, END_CALL, CALL), END_CALL: (CALL,)}  # of a value

KIMI = Marks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
)  # fmt: skip
DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
)

XML = Tags(CALL, END_CALL, "<function=", "</function>", "<parameter=", ">", lines=True)
MINIMAX = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">', lines=False
)
ATEM = MINIMAX._replace(  # Muse's, in messages to the function
    call="<atem:function_calls>", end_call="</atem:function_calls>",
    function='<atem:invoke name="', end_function="</atem:invoke>",
    parameter='<atem:parameter name="', end_parameter="</atem:parameter>",
)  # fmt: skip
SEED = XML._replace(call="<seed:tool_call>", end_call="</seed:tool_call>", lines=False)
DSML = Tags(  # DeepSeek V3.2
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
    '<｜DSML｜invoke name="', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="', '">', lines=False,
    end_parameter="</｜DSML｜parameter>", kinds=(' string="true">', ' string="false">'),
)  # fmt: skip
DSML_4 = DSML._replace(call="<｜DSML｜tool_calls>", end_call="</｜DSML｜tool_calls>")  # DeepSeek V4
STEP = Tags(  # Step 3
    "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
    '<steptml:invoke name="', "</steptml:invoke>",
    '<steptml:parameter name="', '">', lines=False, end_parameter="</steptml:parameter>",
    beside=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
)  # fmt: skip


def _one_text(tags: Tags) -> Written:
    line = "\n" if tags.lines else ""
    head = f"{tags.call}\n{tags.function}{{name}}{tags.close}\n{tags.parameter}input{tags.close}{line}"
    tail = f"{line}{tags.end_parameter}\n{tags.end_function}\n{tags.end_call}"
    return Written(f"{head}{{input}}{tail}", excluded=tuple(tags.ends()))


OBJECT = '{"name": "{name}", "arguments": {arguments}}'
# JSON is what a model is made to write whose notation has none. Every parser reads it where it may come.
ANY_CALLS = (Written(f"{CALL}{{line}}{OBJECT}{{line}}{END_CALL}", "\n"),)
CALLS: Mapping[str, Sequence[Written]] = {
    "harmony": [Written("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}", None)],
    "mistral": [
        Written(f"{MISTRAL_TAG}{{name}}{{id}}{MISTRAL_ARGUMENTS}{{arguments}}", needs=MISTRAL_ARGUMENTS),
        Written(OBJECT, ", ", f"{MISTRAL_TAG}{{space}}[", "]"),
    ],
    "granite": [Written(OBJECT, ", ", f"{GRANITE}[", "]")],
    "command": [
        Written(
            '    {"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}',
            ",\n",
            f"{COMMAND}[\n",
            f"\n]{END_COMMAND}",
        )
    ],
    "deepseek": [
        Written(
            f"{DEEPSEEK.call}{{name}}{DEEPSEEK.arguments}{{arguments}}{DEEPSEEK.end_call}",
            "",
            DEEPSEEK.section,
            DEEPSEEK.end_section,
        )
    ],
    "kimi": [
        Written(
            f"{KIMI.call}functions.{{name}}:{{number}}{KIMI.arguments}{{arguments}}{KIMI.end_call}",
            "",
            KIMI.section,
            KIMI.end_section,
        )
    ],
}
# A call of a tool with one text, in a notation without JSON.
TEXTS: Mapping[str, Written] = {
    "xml": _one_text(XML),
    "minimax": _one_text(MINIMAX),
    "seed": _one_text(SEED),
    "glm": Written(
        f"{CALL}{{name}}{{line}}{KEY}input{END_KEY}{{line}}{VALUE}{{input}}{END_VALUE}{{line}}{END_CALL}",
        excluded=(END_VALUE, END_CALL),
    ),
    "gemma": Written(
        f"{GEMMA_4[0]}call:{{name}}{{input:{GEMMA_4[2]}{{input}}{GEMMA_4[2]}}}{GEMMA_4[1]}", excluded=GEMMA_4[2:]
    ),
}
