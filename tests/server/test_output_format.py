"""Requested forms of an answer as grammars; forced calls in every notation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_specprefill import Constraint, InvalidRequestError
from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.constrained.output_format import (
    OUTPUT_FIELDS,
    OutputFormat,
    parse_response_format,
)
from mlx_specprefill_server.constrained.tool_choice import NamedTool, ToolChoice

from .fakes import SPECIALS, byte_tokenizer

TOKENIZER = byte_tokenizer(specials=(*SPECIALS, "｜DSML｜"))  # a token within a mark
GRAMMARS = Grammars(TOKENIZER, frozenset(TOKENIZER.eos_token_ids))
SPECIAL = TOKENIZER.get_added_vocab()
(STOP,) = TOKENIZER.eos_token_ids


def verdict(constraint: Constraint | None, text: str) -> str:
    """ "whole", "beginning", or where it goes wrong."""
    assert constraint is not None
    way = GRAMMARS.state(constraint, frozenset({STOP}))
    for place, token in enumerate(TOKENIZER.encode(text, add_special_tokens=False)):
        mask = way.mask(len(TOKENIZER))
        if not mask[token]:
            return f"wrong at {place}"
        way.accept(token)
    mask = way.mask(len(TOKENIZER))
    return "whole" if mask[STOP] else "beginning"


def accepts(constraint: Constraint | None, text: str) -> bool:
    return verdict(constraint, text) == "whole"


# --- fields of a request ---------------------------------------------------------------------------------------------


def openai_form(json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "json_schema"),
        (openai_form({"name": "x", "schema": SCHEMA}), "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "json_schema"),
        ({"json_schema": json.dumps(SCHEMA)}, "json_schema"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
    ],
)
def test_every_spelling(body: dict[str, Any], kind: str) -> None:
    output = parse_response_format(body)
    assert output.kind == kind
    text = {"regex": "aaa", "choice": "no", "grammar": "a"}.get(kind, '{"a": 12}')
    constraint = constraint_of(output)
    assert accepts(constraint, text)
    assert not accepts(constraint, text + "x")
    assert not accepts(constraint, text[:-1] + "?")


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, dict.fromkeys(OUTPUT_FIELDS),
                                  {"grammar": "", "json_schema": {}, "structured_outputs": {}}])  # fmt: skip
def test_nothing_asked(body: dict[str, Any]) -> None:
    assert parse_response_format(body) is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (openai_form({"schema": []}), "response_format.json_schema.schema"),
        (openai_form({"schema": {}, "strict": 1}), "response_format.json_schema.strict"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "{" + " " * (1 << 20) + "}"}, "json_schema"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 10_001}}, "structured_outputs.choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_bad_requests_are_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_response_format(body)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


# --- grammars of texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", 'quo"te', "back\\slash", "line\nbreak", "<think>", "😀é", "\x01", ""])
def test_choices_are_spelled_exactly(text: str) -> None:
    constraint = constraint_of(OutputFormat("choice", (text, "other")), special=SPECIAL)
    assert constraint is not None
    way = GRAMMARS.state(constraint, frozenset({STOP}))
    for token in (token for char in text for token in TOKENIZER.encode(char, add_special_tokens=False)):
        mask = way.mask(len(TOKENIZER))
        assert mask[token]
        way.accept(token)
    mask = way.mask(len(TOKENIZER))
    assert mask[STOP]


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [(r"\d{2}/\d{2}", "12/34", "12-34"), ("^a|b$", "b", "ab"), (r"a\/b", "a/b", "ab"), ("a\nb", "a\nb", "anb")],
)
def test_regexes_match_the_whole_answer(regex: str, good: str, bad: str) -> None:
    constraint = constraint_of(OutputFormat("regex", regex))
    assert accepts(constraint, good)
    assert not accepts(constraint, bad)


def test_there_is_one_space_at_most_and_only_where_people_write_one() -> None:
    constraint = constraint_of(OutputFormat("json_object"))
    assert accepts(constraint, '{"a": [1, 2], "b": {}}')
    assert accepts(constraint, '{"a":[1,2],"b":{}}')
    wrong = ('{ "a": 1}', '{"a":  1}', '{"a" : 1}', '{"a": 1 }', '{"a":\n1}', '{\n"a": 1}', '{"a": [ 1]}', ' {"a": 1}')
    for text in wrong:
        assert verdict(constraint, text).startswith("wrong"), text


def test_only_a_lenient_schema_may_hold_what_can_not_be_enforced() -> None:
    schema = {**SCHEMA, "not": {"required": ["b"]}, "x-guidance": {"lenient": True}}
    field = "response_format.json_schema.schema"
    with pytest.raises(InvalidRequestError, match=rf'^{field}: Unimplemented keys: \["not"\]$') as refused:
        constraint_of(OutputFormat("json_schema", schema, strict=True, field=field))
    assert refused.value.field == field
    warnings: list[str] = []
    lenient = constraint_of(OutputFormat("json_schema", schema, field=field), warnings=warnings)
    assert warnings == [f'{field}: Unimplemented keys: ["not"]']
    assert accepts(lenient, '{"a": 1}')
    assert not accepts(lenient, '{"b": 1}')


def test_after_reasoning_json_may_begin_with_a_line_break_and_other_text_may_not() -> None:
    end = (SPECIAL["</think>"],)
    json_text = constraint_of(OutputFormat("json_object"), reasoning_end=end)
    assert json_text.starts_after == end
    free = Constraint(json_text.grammar)
    assert accepts(free, "\n\n{}")
    choice = constraint_of(OutputFormat("choice", ("a", "b")), reasoning_end=end)
    assert not accepts(Constraint(choice.grammar), "\na")


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("<idea>", "</idea>")], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("output", "text"),
    [
        (OutputFormat("json_object"), "{}"),
        (OutputFormat("json_schema", SCHEMA), '{"a": 1}'),
        (OutputFormat("regex", "[ab]+"), "ab"),
        (OutputFormat("choice", ("a", "b")), "b"),
        (None, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ],
)
def test_a_model_may_think_before_a_format(output: OutputFormat | None, text: str, tags: tuple[str, str]) -> None:
    tools = [] if output else [{"type": "function", "function": {"name": "f"}}]
    asked = (output, tools, "auto" if output else "required", "hermes", True, ())
    free = constraint_of(*asked, think=tags, special=SPECIAL)
    thought = f"{tags[0]}\nHm, {{}}.\n{tags[1]}"
    assert accepts(free, text)
    assert accepts(free, f"{thought}{text}")
    assert verdict(free, f"{tags[0]}Hm.") == verdict(free, thought) == "beginning"
    assert accepts(free, f"{thought}\n\n{text}") is (output is None or output.kind.startswith("json"))
    assert not accepts(free, f"\n{text}")
    assert not accepts(free, f"{text}{thought}")
    assert verdict(constraint_of(*asked, special=SPECIAL), thought).startswith("wrong")


# --- forced calls ----------------------------------------------------------------------------------------------------

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"$ref": "#/$defs/days"},
                "unit": {"enum": ["C", "F"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}  # fmt: skip
TIME = {"type": "function", "function": {"name": "weather_time"}}
TOOLS = [WEATHER, TIME]

# (format, a good call of each tool, bad ones)
NOTATIONS = [
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "weather_time", "arguments": {}}\n</tool_call>',
        ['{"name": "weather", "arguments": {}}', '<tool_call>\n{"name": "weather", "arguments": {"city": 1',
         '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 10'],
        "\n",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}',
        "<|channel|>commentary to=functions.weather_time <|constrain|>json<|message|>{}",
        ["<|channel|>final<|message|>Hello", "<|channel|>commentary to=functions.other",
         '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}'],
        None,
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "days": 3}}]',
        '[TOOL_CALLS][{"name": "weather_time", "arguments": {}}]',
        ['[{"name": "weather"', '[TOOL_CALLS][{"name": "weather", "arguments": {"days"'],
        None,
    ),
]  # fmt: skip


def forced(tool_format: str | None, choice: ToolChoice = "required", parallel: bool = True, **more: Any) -> Constraint:
    constraint = constraint_of(None, TOOLS, choice, tool_format, parallel, special=SPECIAL, **more)
    assert constraint is not None
    return constraint


# Notations without JSON, and none at all: forced calls are those of hermes.
WITHOUT_JSON = ["xml", "glm", "minimax", "seed", "muse", "gemma", "lfm2", "dsml", "dsml4", "native", None]
NOTATIONS += [(name, *NOTATIONS[0][1:]) for name in WITHOUT_JSON]


@pytest.mark.parametrize(("tool_format", "call", "other", "bad", "between"), NOTATIONS)
def test_forced_calls(tool_format: str, call: str, other: str, bad: list[str], between: str | None) -> None:
    required = forced(tool_format)
    for good in (call, other):
        assert accepts(required, good)
    assert verdict(required, "Let me see.").startswith("wrong")
    for wrong in bad:
        assert verdict(required, wrong).startswith("wrong"), wrong
    named = forced(tool_format, NamedTool("weather_time"))
    assert accepts(named, other)
    assert not accepts(named, call)
    if between is not None:
        assert accepts(required, call + between + other)
        assert not accepts(forced(tool_format, parallel=False), call + between + other)
        assert not accepts(named, other + between + other)


@pytest.mark.parametrize(
    ("parameters", "arguments", "fits"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1}', True),
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 1, "more": 2}', False),
        ({"properties": {}}, '{"more": 2}', False),
        ({"properties": {"a": {"properties": {"b": {}}}}}, '{"a": {"b": 1, "more": 2}}', False),
        ({"properties": {"a": {"items": {"properties": {"b": {}}}}}}, '{"a": [{"more": 2}]}', False),
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"a": 1, "more": 2}', True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, '{"more": 2}', True),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"b": 1}', True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, '{"a": 1, "b": 2}', True),
        ({}, '{"more": 2}', True),
    ],
)
def test_arguments_have_only_the_members_that_the_tool_describes(parameters: Any, arguments: str, fits: bool) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}
    constraint = constraint_of(None, [tool], "required", "hermes", special=SPECIAL)
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert accepts(constraint, call) is fits


def test_mistral_with_argument_markers() -> None:
    special = {**SPECIAL, "[ARGS]": SPECIAL["[INST]"]}
    required = constraint_of(None, TOOLS, "required", "mistral", special=special)
    good = '[TOOL_CALLS]weather[INST]{"city": "Rome", "days": 3}'
    assert accepts(required, good)
    assert accepts(required, good + "[TOOL_CALLS]weather_time[INST]{}")


def test_markers_are_tokens_where_the_tokenizer_has_them() -> None:
    """Their spelling would be text to the model."""
    special = {**SPECIAL, "<tool_call>": SPECIAL["<s>"], "</tool_call>": SPECIAL["</s>"]}
    required = constraint_of(None, TOOLS, NamedTool("weather_time"), "hermes", special=special)
    assert accepts(required, '<s>\n{"name": "weather_time", "arguments": {}}\n</s>')
    assert verdict(required, "<tool_call>") == "wrong at 0"


def test_calls_or_the_asked_output() -> None:
    output = OutputFormat("json_object")
    either = constraint_of(output, TOOLS, "auto", "hermes", special=SPECIAL)
    assert accepts(either, '{"answer": 1}')
    assert accepts(either, NOTATIONS[0][2])
    assert not accepts(either, "No.")
    none = constraint_of(output, TOOLS, "none", "hermes", special=SPECIAL)
    assert not accepts(none, NOTATIONS[0][2])


def test_harmony_answers_in_its_final_channel() -> None:
    output = constraint_of(OutputFormat("json_object"), (), "auto", "harmony", special=SPECIAL)
    assert accepts(output, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>{}")
    assert accepts(output, "<|channel|>final<|message|>{}")
    with pytest.raises(InvalidRequestError, match="channels"):
        constraint_of(OutputFormat("grammar", 'start: "a"'), (), "auto", "harmony")


@pytest.mark.parametrize(
    ("tools", "choice", "tool_format", "said"),
    [
        (TOOLS, NamedTool("other"), "hermes", "no tool is called 'other'"),
        ([], "required", "hermes", "needs tools"),
        ([{"function": {"name": 'a"b'}}], "required", "hermes", "can't be forced"),
    ],
)
def test_calls_that_can_not_be_forced(tools: Any, choice: ToolChoice, tool_format: str | None, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        constraint_of(None, tools, choice, tool_format)


@pytest.mark.parametrize("tool_format", [name for name, *_ in NOTATIONS])
@pytest.mark.parametrize(
    "parameters",
    [1, [], {"properties": 1}, {"properties": {"a": 1}, "required": 5}, {"required": ["x", 1]}, {"type": 5},
     {"properties": {"a": {"anyOf": 3, "enum": 1, "items": 7, "type": ["string", 4]}}},
     {"properties": {"a": {"type": {}}}}],
)  # fmt: skip
def test_strange_schemas_are_refused_or_followed(tool_format: str, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    try:
        constraint = constraint_of(None, tools, "required", tool_format, special=SPECIAL)
        assert constraint is not None
        GRAMMARS.check(constraint)
    except InvalidRequestError:
        pass
