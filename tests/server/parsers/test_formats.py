from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import (
    function_gemma,
    gemma4,
    glm47,
    json_tools,
    kimi_k2,
    kimi_k3,
    longcat,
    mistral,
    muse_spark,
    pythonic,
    qwen3_coder,
)

from mlx_specprefill_server.notations.formats import detect

from ..fakes import byte_tokenizer
from .reading import TOOLS, Read, collected, read, tool

PARIS = '{"city": "Paris"}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
MUSE = (
    ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
GEMMA = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
OLD_GEMMA = "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
MISTRAL = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
TO_WEATHER = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
SEED = XML.replace("tool_call>", "seed:tool_call>").replace("\nParis\n", "Paris")
DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
)
COMMAND = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}}\n'
    "]<|END_ACTION|>"
)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
PYTHON = "get_weather(city='Paris')"
FUNCTION = f'"function": {{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}'
OPENAI = f'{{"id": "call_1", "type": "function", {FUNCTION}}}'
HARMONY = f"{TO_WEATHER}{PARIS}<|call|>"
STEP_CALL = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
    '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
)
STEP = f"<｜tool_calls_begin｜>\n{STEP_CALL}<｜tool_calls_end｜>"
AGAIN = "<|start|>assistant"
WEATHER = ("get_weather", PARIS)
DAYS = ("get_weather", '{"city": "Paris", "days": 3}')

# What models write as they should, or with a slip that still has only one meaning: format, text, calls, shape, text.
GOOD: list[tuple[str | None, str, list[tuple[str, str]], str, str]] = [
    ("hermes", "Hello.\n", [], "t", "Hello.\n"),
    ("hermes", f"Let me see.\n\n{CALL}\n{CALL}\n", [WEATHER, WEATHER], "tcc", "Let me see."),
    ("hermes", f"I ask.\n\n{CALL}\n\nDone.\n", [WEATHER], "tct", "I ask.\n\n\n\nDone."),
    ("xml", f"I ask. {XML}{XML}Done.", [WEATHER] * 2, "tcct", "I ask. Done."),
    ("mistral", f"I ask.{MISTRAL}\nDone.", [WEATHER], "tct", "I ask.\nDone."),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', [WEATHER], "c", ""),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", "{}")], "c", ""),
    ("hermes", CALL.replace("get_weather", "functions.get_weather"), [WEATHER], "c", ""),
    ("hermes", CALL.replace("get_weather", "get_weather<|channel|>commentary"), [WEATHER], "c", ""),
    ("hermes", CALL.replace("\n</tool_call>", ""), [WEATHER], "c", ""),  # no end tag
    ("hermes", CALL.replace("<tool_call>\n", "I ask. "), [WEATHER], "tc", "I ask."),
    ("hermes", CALL.replace("}}\n", "\n"), [WEATHER], "c", ""),
    ("hermes", CALL.replace('"Paris"', '"Paris",'), [WEATHER], "c", ""),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>', [("now", "{}")] * 2, "cc", ""),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', [("now", "{}")] * 2, "cc", ""),
    ("hermes", f"{LLAMA}\n{LLAMA}", [WEATHER] * 2, "cc", ""),
    ("hermes", f"<|python_tag|>{LLAMA}; {LLAMA};", [WEATHER] * 2, "cc", ""),
    ("hermes", f'{LLAMA}; {{"city": "Paris"}}', [WEATHER], "ct", '; {"city": "Paris"}'),
    ("hermes", CALL.replace(">\n", ">\n```json\n").replace("\n<", "\n```\n<"), [WEATHER], "c", ""),
    ("hermes", f"<tool_call>\n[{OPENAI}, {OPENAI}]\n</tool_call>", [WEATHER] * 2, "cc", ""),
    ("hermes", OPENAI, [WEATHER], "c", ""),
    ("hermes", CALL.replace('"name"', '"function"'), [WEATHER], "c", ""),
    ("hermes", XML, [WEATHER], "c", ""),
    ("xml", CALL, [WEATHER], "c", ""),
    ("xml", XML.replace("<tool_call>\n", "I ask. "), [WEATHER], "tc", "I ask."),
    ("xml", XML.replace("</parameter>\n</function>\n", ""), [WEATHER], "c", ""),
    ("xml", XML.replace("\n</function>\n</tool_call>", ""), [WEATHER], "c", ""),
    ("xml", XML.replace("get_weather>", "get_weather"), [WEATHER], "c", ""),
    ("xml", "<function=now>\n</function>", [("now", "{}")], "c", ""),
    ("glm", f"I ask.\n{GLM}{GLM}", [WEATHER, WEATHER], "tcc", "I ask."),
    ("glm", GLM.replace("\n", ""), [WEATHER], "c", ""),
    ("glm", "<tool_call>now</tool_call>", [("now", "{}")], "c", ""),
    ("glm", f"<tool_call>get_weather\n{PARIS}</tool_call>", [WEATHER], "c", ""),
    ("minimax", MINIMAX.replace("</invoke>\n", ""), [WEATHER], "c", ""),
    ("gemma", OLD_GEMMA, [WEATHER], "c", ""),
    (
        "gemma",
        '<|tool_call>call:x{a:[1,{b:<|"|>}]"<|"|>}],c:true,d:null,e:-1.5e3,f:bare}<tool_call|>',
        [("x", '{"a": [1, {"b": "}]\\""}], "c": true, "d": null, "e": -1.5e3, "f": "bare"}')],
        "c",
        "",
    ),
    ("mistral", f"{MISTRAL}get_weather[ARGS]{PARIS}", [WEATHER, WEATHER], "cc", ""),
    ("mistral", MISTRAL.replace("[ARGS]", "[CALL_ID]abc123[ARGS]"), [WEATHER], "c", ""),
    ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "x"}}]', [WEATHER], "c", ""),
    ("mistral", f"I ask.\nget_weather[TOOL_CALLS]{PARIS}", [WEATHER], "tc", "I ask."),  # the name before its mark
    ("mistral", f"It is now{MISTRAL}", [WEATHER], "tc", "It is now"),
    ("harmony", f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}", [WEATHER], "c", ""),
    ("harmony", HARMONY.replace("get_weather", "get_weather<|channel|>commentary"), [WEATHER], "c", ""),
    ("harmony", "<|channel|>commentary to=user<|message|>Hello.", [], "t", "Hello."),
    ("harmony", f"{HARMONY}{AGAIN}{HARMONY}", [WEATHER, WEATHER], "cc", ""),
    (
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|>{AGAIN}<|channel|>commentary<|message|>I ask.<|end|>{AGAIN}{HARMONY}",
        [WEATHER],
        "rtc",
        "I ask.",
    ),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello.", [], "rt", "Hello."),
    # a header without its end
    (
        "harmony",
        f"<|channel|>analysis Hm.<|end|>{AGAIN}<|channel|>commentary I ask.<|end|>{AGAIN}{HARMONY}",
        [WEATHER],
        "rtc",
        "I ask.",
    ),
    # the type of the text in other places
    ("harmony", HARMONY.replace(" <|constrain|>json<|message|>", "<|message|><|constrain|>json"), [WEATHER], "c", ""),
    ("seed", SEED, [WEATHER], "c", ""),
    ("granite", f"<|tool_call|>[{LLAMA}, {LLAMA}]", [WEATHER] * 2, "cc", ""),
    ("granite", f"<tool_call>[{LLAMA}]", [WEATHER], "c", ""),
    ("lfm2", f"<|tool_call_start|>[{LLAMA}]<|tool_call_end|>", [WEATHER], "c", ""),
    ("harmony", f"{TO_WEATHER.replace('get_weather', 'now')}<|call|>", [("now", "{}")], "c", ""),
    ("command", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", [], "t", "Hello."),
    ("command", COMMAND.replace("<|END_ACTION|>", ""), [WEATHER], "c", ""),
    ("deepseek", DEEPSEEK.removeprefix("<｜tool▁calls▁begin｜>"), [WEATHER], "c", ""),
    ("deepseek", DEEPSEEK.replace("<｜tool▁call▁end｜>", ""), [WEATHER], "c", ""),
    ("deepseek", f"{DEEPSEEK[: -len('<｜tool▁calls▁end｜>')]}{DEEPSEEK}", [WEATHER] * 2, "cc", ""),
    ("deepseek", f"I ask.\n{CALL}", [WEATHER], "tc", "I ask."),  # the distillations
    ("dsml", DSML.replace(' string="true"', ""), [WEATHER], "c", ""),
    (
        "dsml",
        DSML.replace("<｜DSML｜invoke", '<｜DSML｜invoke name="now" />\n<｜DSML｜invoke', 1),
        [("now", "{}"), WEATHER],
        "cc",
        "",
    ),
    ("kimi", KIMI.removeprefix("<|tool_calls_section_begin|>"), [WEATHER], "c", ""),
    ("dsml4", DSML.replace("function_calls>", "tool_calls>"), [WEATHER], "c", ""),
    (None, f'<TOOLCALL>[{LLAMA}, {{"name": "now"}}]</TOOLCALL>', [WEATHER, ("now", "{}")], "cc", ""),
    (None, f"I ask.\n<tool_calls>\n{LLAMA}\n{LLAMA}\n</tool_calls>", [WEATHER] * 2, "tcc", "I ask."),
    (
        None,
        f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"now": {{}}}}]<|tools_suffix|>',
        [WEATHER, ("now", "{}")],
        "cc",
        "",
    ),
    (None, f"<|action_start|><|plugin|>\n{LLAMA}<|action_end|>", [WEATHER], "c", ""),
    (None, f"I ask.<|function_call|>{LLAMA}", [WEATHER], "tc", "I ask."),
    (None, f"I ask.<|message_sep|>\n\nfunction call<|role_sep|>\n{LLAMA}", [WEATHER], "tc", "I ask."),
    (None, f"<function_call> {LLAMA}\n", [WEATHER], "c", ""),
    (None, f"functools[{LLAMA}]", [WEATHER], "c", ""),
    (None, f"I ask.\nAction: ```json\n[{LLAMA.replace('name', 'tool_name')}]\n```", [WEATHER], "tc", "I ask."),
    (None, f"<|tool_call|>[{LLAMA}]<|/tool_call|>", [WEATHER], "c", ""),  # Phi-4-mini
    (None, f"```tool_code\n{PYTHON}\nnow()\n```", [WEATHER, ("now", "{}")], "cc", ""),  # Gemma 3
    (None, f"I ask.\n<function_calls>\n{PYTHON}\nnow()\n</function_calls>", [WEATHER, ("now", "{}")], "tcc", "I ask."),
    (None, f"<|python_tag|>{PYTHON.replace('(', '.call(')}", [WEATHER], "c", ""),
    (
        None,
        "[write(path='a', content={'it\\'s': [None, True, -1.5, \"\"]})]",
        [("write", '{"path": "a", "content": {"it\'s": [null, true, -1.5, ""]}}')],
        "c",
        "",
    ),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Paris')<|tool_call_end|>", [WEATHER], "c", ""),
    (None, "[now(a=9 , b=[1], c=None)]", [("now", '{"a": 9, "b": [1], "c": null}')], "c", ""),  # not declared
    # strings without quotes, as some templates show them, and with their own quotes in them
    (
        None,
        "[get_weather(city=Paris, days=03, exact=True)]",
        [("get_weather", f'{DAYS[1][:-1]}, "exact": true}}')],
        "c",
        "",
    ),
    (
        "lfm2",
        "<|tool_call_start|>[write(path=a, b.txt, content=f(x) or [y], or not)]<|tool_call_end|>",
        [("write", '{"path": "a, b.txt", "content": "f(x) or [y], or not"}')],
        "c",
        "",
    ),
    (
        "lfm2",
        """<|tool_call_start|>[write(content='python -c "print(f(\'a\', sep='\\n'))"'), now()]<|tool_call_end|>""",
        [("write", '{"content": "python -c \\"print(f(\'a\', sep=\'\\n\'))\\""}'), ("now", "{}")],
        "cc",
        "",
    ),
    (None, f"<function=get_weather>{PARIS}</function>", [WEATHER], "c", ""),
    (None, STEP.replace(STEP_CALL, STEP_CALL * 2), [WEATHER] * 2, "cc", ""),
    (None, f'{{"thought": "Hm.", "tool_calls": [{OPENAI}]}}\n', [WEATHER], "c", ""),  # xLAM
    (None, f"I ask.\n[{PYTHON}, now()]", [WEATHER, ("now", "{}")], "tcc", "I ask."),
    (None, f"Not {LLAMA} but\n{CALL}", [WEATHER], "tc", f"Not {LLAMA} but"),
]


def shown(out: Read) -> tuple[Any, ...]:
    return out.calls, out.shape, out.text


@pytest.mark.parametrize(("fmt", "text", "calls", "shape", "content"), GOOD)
def test_calls_are_read_however_the_text_is_cut(
    fmt: str | None, text: str, calls: list[tuple[str, str]], shape: str, content: str
) -> None:
    assert shown(read(fmt, text)) == (calls, shape, content)
    assert shown(read(fmt, text, range(1, len(text)))) == (calls, shape, content)
    for cut in range(1, len(text)):
        assert shown(read(fmt, text, [cut])) == (calls, shape, content), text[:cut]


# What is no call: it comes back as it is. The last column: how much of the arguments had been passed on before.
BAD: list[tuple[str, str, str]] = [
    ("hermes", "<tool_call>{not json}</tool_call>", ""),
    ("hermes", "<tool_call>\n</tool_call>", ""),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "Paris"}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Par', '{"city": "Par'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"days": 1, x}}</tool_call>', '{"days": 1'),
    ("hermes", '{"name": "Anna", "arguments": {}}', ""),
    ("hermes", "```tool_code\nprint(get_weather)\n```", ""),
    ("hermes", '{"name": "get_weather"}', ""),
    ("xml", "<tool_call>\n<function=>\nParis\n</tool_call>", ""),
    ("xml", "<tool_call>\n<function=get_weather>\nParis\n</function>\n</tool_call>", ""),
    ("xml", "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar", '{"city": "Par'),
    ("glm", "<tool_call>unheard_of</tool_call>", ""),
    ("glm", "<tool_call>get_weather\nParis</tool_call>", ""),
    ("gemma", '<|tool_call>call:get_weather{city:<|"|>Par', '{"city": "Par'),
    ("minimax", "<minimax:tool_call>\n</minimax:tool_call>", ""),
    ("mistral", "[TOOL_CALLS]get_weather[ARGS]Paris", ""),
    ("mistral", "now[TOOL_CALLS]{x", ""),
    # marks that other families have: only a known tool is called behind them
    *(
        ("hermes", text, "")
        for text in (
            '<tool_calls>[{"unheard_of": {}}]</tool_calls>',
            "[unheard_of()]",
            "[get_weather('Paris')]",
            "[get_weather(city=Paris]",
            "import functools",
            '{"tool_calls": [{"name": "Anna", "arguments": {}}]}',
            # known tools in prose
            f"Write {LLAMA} or [{PYTHON}] to ask.",
            "See [now()](http://localhost)",
            '{"function": ' * 2000,
        )
    ),
    ("lfm2", "<|tool_call_start|>[get_weather(city='Paris' days=3)]<|tool_call_end|>", '{"city": "Paris"'),
    ("lfm2", "<|tool_call_start|>[get_weather(city=Paris, unit=C)]<|tool_call_end|>", ""),
    ("harmony", f'{TO_WEATHER}{{"city": oops}}', ""),
    ("harmony", "<|channel|>commentary to=functions.get_wea", ""),
]


@pytest.mark.parametrize(("fmt", "text", "passed_on"), BAD)
def test_what_is_no_call_comes_back_as_text(fmt: str, text: str, passed_on: str) -> None:
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        out = read(fmt, text, cuts)
        assert (out.text, out.calls, out.reasoning) == (text, [], "")
        assert "".join(arguments for _, arguments in out.broken) == passed_on


def test_a_good_call_after_a_bad_one_is_found() -> None:
    out = read("hermes", f"<tool_call>{{oops</tool_call>\n{CALL}")
    assert (out.text, out.calls) == ("<tool_call>{oops</tool_call>", [WEATHER])


def test_xml_cut_off_at_the_token_limit_is_no_call() -> None:
    whole = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    assert read("xml", whole).calls == [WEATHER]
    out = read("xml", whole, complete=False)
    assert (out.calls, out.text) == ([], whole)


@pytest.mark.parametrize(("fmt", "text"), [("hermes", CALL), ("xml", XML), ("glm", GLM), ("gemma", GEMMA),
                                          ("mistral", MISTRAL)])  # fmt: skip
def test_without_tools_everything_is_text(fmt: str, text: str) -> None:
    assert read(fmt, text, tools=[]).text == text


def test_without_tools_a_message_to_a_function_is_text() -> None:
    out = read("harmony", HARMONY, tools=[])
    assert (out.calls, out.text) == ([], HARMONY.removesuffix("<|call|>"))


@pytest.mark.parametrize("name", ["fs.read", "functions.read", "mcp__fs.read:2", "functions"])
def test_harmonys_recipient_is_the_tool_whose_name_it_is(name: str) -> None:
    for recipient in (name, f"functions.{name}"):
        text = f"<|channel|>commentary to={recipient} <|constrain|>json<|message|>{{}}<|call|>"
        for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
            assert read("harmony", text, cuts, tools=[tool(name)]).calls == [(name, "{}")]


# --- types -----------------------------------------------------------------------------------------------------------


def xml_value(schema: Any, text: str) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
    written = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    ((_, arguments),) = read("xml", written, tools=tools).calls
    return json.loads(arguments)["x"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "", ""),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"type": "integer"}, " 42 ", 42),
        ({"type": "integer"}, "42.0", 42),
        ({"type": "integer"}, "forty", "forty"),
        ({"type": "float"}, "3.5", 3.5),  # Python's words
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({}, "42", "42"),
        ({}, '{"a": 1}', {"a": 1}),
    ],
)
def test_values_take_the_type_of_the_schema(schema: Any, text: str, value: Any) -> None:
    got = xml_value(schema, text)
    assert (got, type(got)) == (value, type(value))


@given(st.text(alphabet='a"\\\n\t\r<>/é🎉 \x00', max_size=40))
def test_text_values_arrive_character_by_character_as_they_are(value: str) -> None:
    text = f"<function=write>\n<parameter=content>\n{value}\n</parameter>\n</function>"
    ((_, arguments),) = read("xml", text, range(1, len(text))).calls
    assert json.loads(arguments) == {"content": value}


@pytest.mark.parametrize(
    ("schema", "is_text", "text", "value"),
    [
        ({"type": "integer"}, True, "3", 3),
        ({"type": "string"}, False, "null", "null"),
        ({"type": ["string", "integer"]}, False, "3", 3),
        ({"type": ["string", "null"]}, True, "null", "null"),
        ({}, False, "3", 3),
        ({"type": "number"}, False, "3.0", 3.0),
    ],
)
def test_what_tags_say_of_a_value_chooses_among_the_types_of_the_schema(
    schema: Any, is_text: bool, text: str, value: Any
) -> None:
    said = f'<｜DSML｜parameter name="x" string="{str(is_text).lower()}">{text}</｜DSML｜parameter>'
    written = f'<｜DSML｜function_calls><｜DSML｜invoke name="f">{said}</｜DSML｜invoke></｜DSML｜function_calls>'
    ((_, arguments),) = read("dsml", written, tools=[tool("f", x=schema)]).calls
    got = json.loads(arguments)["x"]
    assert (got, type(got)) == (value, type(value))


def test_values_about_the_format_itself_stay_whole() -> None:
    value = "Write <parameter=x>\nv</parameter> in <function=f></function> in <tool_call></tool_call>."
    text = f"<tool_call>\n<function=write>\n<parameter=content>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = read("xml", text).calls
    assert json.loads(arguments) == {"content": value}


# --- streaming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "before", "after"),
    [
        ("hermes", '<tool_call>{"name": "write", "arguments": {"content": "', '"}}</tool_call>'),
        ("xml", "<tool_call>\n<function=write>\n<parameter=content>\n", "\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>", "</arg_value></tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="write"><parameter name="content">', "</parameter></invoke>"),
        ("gemma", '<|tool_call>call:write{content:<|"|>', '<|"|>}<tool_call|>'),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"content": "', '"}'),
        ("harmony", '<|channel|>commentary to=functions.write<|message|>{"content": "', '"}'),
    ],
)
def test_arguments_are_passed_on_as_they_are_generated(fmt: str, before: str, after: str) -> None:
    parser = detect(byte_tokenizer(), fmt).parser(TOOLS, "")
    parser.push(before)
    for word in ("one ", "two ", "three "):
        assert word.strip() in "".join(getattr(event, "text", "") for event in parser.push(word))
    parser.push(after)
    parser.finish(True)


def test_plain_text_is_not_held_back() -> None:
    parser = detect(byte_tokenizer(), "hermes").parser(TOOLS, "")
    said = [[getattr(event, "text", "") for event in parser.push(part)] for part in ("a", " b", " <", "x", " {", "y")]
    assert said == [["a"], [" b"], [], [" <x"], [], [" {y"]]


# --- against mlx-lm's own parsers ------------------------------------------------------------------------------------

VALUES = st.text(alphabet='ab "\\{}\n:,é', max_size=12)


@settings(max_examples=60)
@given(city=VALUES, days=st.integers(-5, 10**6), exact=st.booleans())
def test_well_formed_calls_mean_what_they_mean_to_mlx_lm(city: str, days: int, exact: bool) -> None:
    given_: dict[str, Any] = {"city": city, "days": days, "exact": exact}
    body = json.dumps({"name": "get_weather", "arguments": given_}, ensure_ascii=False)
    tagged = "".join(
        f"<parameter={k}>\n{v if k == 'city' else json.dumps(v)}\n</parameter>\n" for k, v in given_.items()
    )
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v.strip() if k == 'city' else json.dumps(v)}</arg_value>\n"
        for k, v in given_.items()
    )
    marked = f'city:<|"|>{city}<|"|>,days:{days},exact:{json.dumps(exact)}'
    for fmt, module, inner in (
        ("hermes", json_tools, body),
        ("xml", qwen3_coder, f"<function=get_weather>\n{tagged}</function>"),
        ("glm", glm47, f"get_weather\n{pairs}"),
        ("gemma", gemma4, f"call:get_weather{{{marked}}}"),
        ("mistral", mistral, f"get_weather[ARGS]{json.dumps(given_)}"),
    ):
        theirs = module.parse_tool_call(inner, TOOLS)
        ((name, arguments),) = read(fmt, module.tool_call_start + inner + module.tool_call_end).calls
        ours = {"name": name, "arguments": json.loads(arguments)}
        if fmt == "xml" and city.lower() == "null":
            theirs["arguments"]["city"] = city  # qwen3_coder makes null of it even where the schema says string
        assert ours == theirs, fmt


# --- formats that are read whole, by mlx-lm --------------------------------------------------------------------------


def native_tokenizer(module: Any = longcat) -> TokenizerWrapper:
    tags = {"tool_call_start": module.tool_call_start, "tool_call_end": module.tool_call_end}
    return TokenizerWrapper(byte_tokenizer()._tokenizer, tool_parser=module.parse_tool_call, **tags)


def native(text: str, complete: bool = True) -> Read:
    parser = detect(native_tokenizer()).parser(TOOLS, "")
    events = [event for char in text for event in parser.push(char)]
    return collected(events + parser.finish(complete))


def test_other_formats_are_read_whole_by_mlx_lm() -> None:
    call = '<longcat_tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</longcat_tool_call>'
    out = native(f"I ask.\n{call}{call}")
    assert [(name, json.loads(arguments)) for name, arguments in out.calls] == [("get_weather", {"city": "Paris"})] * 2
    assert out.text == "I ask."


def test_the_marks_that_mlx_lm_knows_around_answers_are_left_out() -> None:
    """Kimi K3 puts tags around its answer and its whole message."""
    marks = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    tags = {"tool_call_start": kimi_k3.tool_call_start, "tool_call_end": kimi_k3.tool_call_end}
    fast = byte_tokenizer(specials=marks)._tokenizer
    fmt = detect(TokenizerWrapper(fast, tool_parser=kimi_k3.parse_tool_call, **tags))
    said = "Hm.<close>think<sep><open>response<sep>I ask.<close>response<sep>"
    asked = '<open>call tool="now" index="1"<sep><close>call<sep>'
    text = f"{said}<open>tools<sep>{asked}<close>tools<sep><close>message<sep>"
    text = text.replace("<open>", marks[0]).replace("<close>", marks[1]).replace("<sep>", marks[2])
    for size in (1, len(text)):
        parser = fmt.parser(TOOLS, "<|open|>think<|sep|>")
        deltas = [delta for at in range(0, len(text), size) for delta in parser.push(text[at : at + size])]
        out = collected(deltas + parser.finish(complete=True))
        assert (out.reasoning, out.text, out.calls) == ("Hm.", "I ask.", [("now", "{}")])


def test_other_formats_are_also_read_in_the_notation_of_forced_calls() -> None:
    assert native(f"{CALL}\n{CALL}").calls == [WEATHER] * 2


@pytest.mark.parametrize("body", ["oops", '{"name": 3}', '{"name": "f", "arguments": [1]}', "7", "[1]", ""])
def test_what_mlx_lm_cannot_read_comes_back_as_text(body: str) -> None:
    text = f"<longcat_tool_call>{body}</longcat_tool_call> and more"
    out = native(text)
    assert (out.text, out.calls) == (text, [])
    assert native(f"<longcat_tool_call>{body}", complete=False).text == f"<longcat_tool_call>{body}"


# --- detection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<tool_call>\n{{ tool_call.name }}", "hermes"),
        ("<tool_call>\n<function={{ tool_call.name }}>", "xml"),
        ("<tool_call>{{ tool_call.name }}<arg_key>", "glm"),
        ("[TOOL_CALLS]{{ x }}[ARGS]", "mistral"),
        ("<|tool_call>call:{{ x }}<tool_call|>", "gemma"),
        ("<start_function_call>call:{{ x }}", "gemma"),
        ("<|start|>assistant<|channel|>commentary<|message|>", "harmony"),
        ("<seed:tool_call>\n<function={{ x }}>", "seed"),
        ("<|start|>assistant to={{ x }}<|message|><atem:function_calls>", "muse"),
        ("<|tool_calls_section_begin|>{{ x }}", "kimi"),
        ("<think><｜tool▁calls▁begin｜>{{ x }}", "deepseek"),
        ("{% set mark = '｜DSML｜' %}{{ '<' + mark + 'function_calls>' }}", "dsml"),
        ("{% set mark = '｜DSML｜' %}{{ '<' + mark + 'tool_calls>' }}", "dsml4"),
        ("<|START_ACTION|>{{ x }}<|END_ACTION|>", "command"),
        ("write <|tool_call|> and a list", "granite"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_format_is_told_by_the_template(template: str | None, expected: str | None) -> None:
    assert detect(byte_tokenizer(template)).tools == expected


def test_the_format_of_a_template_in_python_is_told_by_the_vocabulary() -> None:
    """DeepSeek V3.2 has the tokens of the notation before its own, too."""
    bare = byte_tokenizer(None, specials=("<｜tool▁calls▁begin｜>", "｜DSML｜"))._tokenizer
    assert detect(TokenizerWrapper(bare, chat_template=deepseek_v32.apply_chat_template)).tools == "dsml"


def test_formats_can_be_set_by_hand() -> None:
    fmt = detect(byte_tokenizer("[TOOL_CALLS]"), "xml", "mistral")
    assert (fmt.tools, fmt.think) == ("xml", ("[THINK]", "[/THINK]"))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (longcat, "native"),
        (pythonic, "lfm2"),
        (kimi_k2, "kimi"),
        (function_gemma, "gemma"),
        (qwen3_coder, "hermes"),
        (muse_spark, "muse"),
    ],
)
def test_formats_that_mlx_lm_has_chosen_are_read_by_the_own_parser_if_there_is_one(module: Any, expected: str) -> None:
    assert detect(native_tokenizer(module)).tools == expected
    assert detect(native_tokenizer(module), "native").tools == expected


def test_a_model_that_mlx_lm_has_no_parser_for_has_no_native_format() -> None:
    assert detect(byte_tokenizer(), "native").tools is None


@pytest.mark.parametrize("tag", ["answer", "response"])
def test_the_tags_that_a_template_puts_around_answers_are_none_of_the_text(tag: str) -> None:
    """Hunyuan, ERNIE."""
    fmt = detect(byte_tokenizer(f"{{{{- '<{tag}>' ~ messages[-1].content ~ '</{tag}>' }}}}"))
    for text, said, calls in (
        (f"<think>Hm.</think>\n<{tag}>\nHello.\n</{tag}>", "Hello.", []),
        (f"<{tag}>\nI ask.\n{CALL}\n</{tag}>", "I ask.", [WEATHER]),
    ):
        for size in (1, 7, len(text)):
            parser = fmt.parser(TOOLS, "")
            deltas = [delta for at in range(0, len(text), size) for delta in parser.push(text[at : at + size])]
            out = collected(deltas + parser.finish(True))
            assert (out.text.strip(), out.calls) == (said, calls)
    other = detect(byte_tokenizer("{{- messages[-1].content }}")).parser(TOOLS, "")
    assert collected(other.push(f"<{tag}>a</{tag}>") + other.finish(True)).text == f"<{tag}>a</{tag}>"


# A call that the model shows in a document: (before it, behind it).
SHOWN = [
    ("An example:\n```\n", "\n```\nIs that right?"),
    ("~~~\n", "\n~~~\nThat is how to ask."),
    ("````\n```\n", "\n```\n````\nSo."),
    ("```\nf()\n```\n\nAnd:\n```\n", "\n```\n"),
    ("Write `", "` to ask."),
    ("```\n", " is one.\n"),
]
# A call that is one: the fence is the whole answer, or nothing follows in it, or it is closed before.
MEANT = [
    ("```json\n", "\n```", ""),
    ("\n``` tool_call\n", "\n```\n", ""),
    ("```\n", "", ""),
    ("I run:\n```sh\nls\n```\n", "", "I run:\n```sh\nls\n```"),
    ("I ask `f`:\n", "", "I ask `f`:"),
]
IN_CODE: list[tuple[str | None, str]] = [
    (None, LLAMA), (None, f"<tool_calls>[{LLAMA}]</tool_calls>"), ("hermes", CALL), ("xml", XML), ("glm", GLM),
    ("minimax", MINIMAX), ("mistral", MISTRAL), ("gemma", GEMMA), ("kimi", KIMI), ("deepseek", DEEPSEEK),
    ("dsml", DSML), ("seed", SEED), ("granite", f"<|tool_call|>[{LLAMA}]"), ("command", COMMAND),
    (None, STEP), (None, f"[{PYTHON}]"), (None, f'{{"tool_calls": [{LLAMA}]}}'),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "call"), IN_CODE)
@pytest.mark.parametrize(("before", "behind"), SHOWN)
def test_a_call_in_a_document_is_shown_and_not_made(fmt: str | None, call: str, before: str, behind: str) -> None:
    text = f"{before}{call}{behind}"
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        out = read(fmt, text, cuts)
        assert (out.calls, out.broken, out.text.strip()) == ([], [], text.strip()), text[: cuts[0]] if cuts else text


@pytest.mark.parametrize(("fmt", "call"), IN_CODE)
@pytest.mark.parametrize(("before", "behind", "said"), MEANT)
def test_a_call_in_a_fence_is_made_where_it_ends_the_answer(
    fmt: str | None, call: str, before: str, behind: str, said: str
) -> None:
    text = f"{before}{call}{behind}"
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        out = read(fmt, text, cuts)
        assert (out.calls, out.text.strip()) == ([WEATHER], said), text[: cuts[0]] if cuts else text
