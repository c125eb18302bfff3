"""Whatever a grammar of calls lets through, the parser of the same notation reads as calls that meet the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill.constraints import Grammars
from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.deltas import CallDelta, CallEnd, CallStart, TextDelta
from mlx_specprefill_server.parsers.formats import Format
from mlx_specprefill_server.settings import ToolParser

from .fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, frozenset(TOKENIZER.eos_token_ids))
(STOP,) = TOKENIZER.eos_token_ids
LONGEST = 3000

PROPERTIES = st.dictionaries(
    st.from_regex(r"[a-z]{1,4}", fullmatch=True),
    st.sampled_from(
        [
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "boolean"},
            {"enum": ["x", "y z", "12"]},
            {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            {"$ref": "#/$defs/small"},
        ]
    ),
    max_size=4,
)


def tool(name: str, properties: dict[str, Any], required: int) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": -5, "maximum": 5}},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def walk(tools: list[dict[str, Any]], tool_format: str, seed: int) -> str:
    """A random text that the grammar takes, ended when it may end."""
    constraint = constraint_of(None, tools, "required", tool_format, special=TOKENIZER.get_added_vocab())
    assert constraint is not None
    state, tokens, rng = GRAMMARS.state(constraint, frozenset({STOP})), list[int](), random.Random(seed)
    while len(tokens) < LONGEST:
        mask = state.mask(len(TOKENIZER))
        if mask[STOP] and rng.random() < 0.7:
            return str(TOKENIZER.decode(tokens))
        tokens.append(rng.choice([int(token) for token in mask.nonzero()[0] if token != STOP] or [STOP]))
        if tokens[-1] == STOP:
            return str(TOKENIZER.decode(tokens[:-1]))
        state.accept(tokens[-1])
    raise AssertionError("the text does not end")


@pytest.mark.parametrize("tool_format", ["hermes", "xml", "harmony", "mistral", "gemma", "glm", "lfm2"])
@settings(max_examples=12)
@given(properties=PROPERTIES, required=st.integers(0, 4), seed=st.integers(0, 999))
def test_forced_calls_are_read_as_calls(
    tool_format: ToolParser, properties: dict[str, Any], required: int, seed: int
) -> None:
    tools = [tool("one", properties, required), tool("other", {"flag": {"type": "boolean"}}, 1)]
    text = walk([*tools], tool_format, seed).partition("<|start|>assistant")
    parser = Format(tool_format, None).parser(tools, "")
    events = [*parser.push(text[2] or text[0]), *parser.finish(True)]
    assert not "".join(event.text for event in events if isinstance(event, TextDelta)).strip()
    names = [event.name for event in events if isinstance(event, CallStart)]
    assert names
    assert len(names) == sum(isinstance(event, CallEnd) for event in events)
    assert_arguments(events, tools)


@pytest.mark.parametrize("tool_format", ["hermes", "xml", "mistral", "gemma", "glm", "lfm2"])
def test_calls_come_to_an_end_though_the_model_never_ends_them(tool_format: ToolParser) -> None:
    """The longest way through the grammar: whoever likes calls and white space gets no more of them than this."""
    tools = [tool("one", {"flag": {"type": "boolean"}}, 1)]
    constraint = constraint_of(None, tools, "required", tool_format, special=TOKENIZER.get_added_vocab())
    assert constraint is not None
    state, tokens = GRAMMARS.state(constraint, frozenset({STOP})), list[int]()
    while len(tokens) < 4 * LONGEST:
        mask = state.mask(len(TOKENIZER))
        liked = [int(token) for token in mask.nonzero()[0] if token != STOP]
        if not liked:
            break
        tokens.append(min(liked, key=lambda token: (not TOKENIZER.decode([token]).isspace(), token)))
        state.accept(tokens[-1])
    text = TOKENIZER.decode(tokens)
    parser = Format(tool_format, None).parser(tools, "")
    events = [*parser.push(text), *parser.finish(True)]
    assert sum(isinstance(event, CallEnd) for event in events) == 16
    assert not re.search(r"\s{3}", text)


def assert_arguments(events: list[Any], tools: list[dict[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    name, written = "", ""
    for event in events:
        match event:
            case CallStart():
                name, written = event.name, ""
            case CallDelta():
                written += event.text
            case CallEnd():
                jsonschema.validate(json.loads(written), schemas[name])
