"""Parts of a schema that aren't enforced are refused or reported. The grammar library, asked here, agrees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from starlette.testclient import TestClient

from mlx_specprefill_server.constrained.enforceable import EnforceableSchema
from tests.support.examples import examples

from .canned_answers import named_events
from .conftest import events
from .fakes import FakeEngine

TOKENS = LLTokenizer("byte")


def trouble(schema: Any) -> str:
    """Return llguidance's objection to a schema, "" if it has none."""
    text: str = LLMatcher.validate_grammar(
        "start: %json " + json.dumps({**schema, "x-guidance": {"lenient": False}}), TOKENS
    )
    return text


UNIMPLEMENTED = 'Unimplemented keys: ["{}"]'
LEFT_OUT = [
    ({"uniqueItems": True}, UNIMPLEMENTED.format("uniqueItems")),
    ({"type": "array", "items": {"uniqueItems": True}}, UNIMPLEMENTED.format("uniqueItems")),
    ({"properties": {"a": {"items": {"not": {}}}}}, UNIMPLEMENTED.format("not")),
    ({"anyOf": [{"type": "null"}, {"contains": {}}]}, UNIMPLEMENTED.format("contains")),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"propertyNames": {"maxLength": 3}}}}, UNIMPLEMENTED.format("propertyNames")),
    ({"additionalProperties": {"format": "int64"}}, "Unknown format: int64"),
    ({"pattern": "(?=a)b"}, "`pattern` at the top is not supported: look-around"),
    ({"properties": {"a": {"pattern": r"(a)\1"}}}, "`pattern` at properties.a is not supported: backreferences"),
    ({"patternProperties": {"(?!a)": {}}}, "`patternProperties` at the top is not supported: look-around"),
    ({"$ref": "https://example.com/a.json"}, "`$ref` at the top is not supported: 'https://example.com/a.json'"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}}, "$ref": "#/$defs/a"}, "`$ref` at $defs.a is not supported: '#/$defs/b'"),
    ({"type": []}, "`type` at the top is not supported"),
    ({"type": "str"}, "`type` at the top is not supported: Invalid type: str"),
    ({"type": "integer", "minimum": 2, "maximum": 1}, "`minimum` at the top can't be enforced beside"),
    ({"oneOf": [{"type": "string"}, {"minLength": 3}]}, "`oneOf` at the top is taken as anyOf"),
    ({"oneOf": [{"const": 1}, {"enum": [2, 1]}]}, "`oneOf` at the top is taken as anyOf"),
    *(({word: {"a": ["b"]}}, UNIMPLEMENTED.format(word)) for word in ("dependentRequired", "dependencies")),
    *(({word: {"type": "string"}}, UNIMPLEMENTED.format(word)) for word in ("if", "then", "else", "unevaluatedItems")),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "sentence"), LEFT_OUT)
def test_each_is_named_and_the_rest_is_enforced(schema: dict[str, Any], sentence: str) -> None:
    found = EnforceableSchema(schema)
    assert len(found.left_out) == 1
    assert found.left_out[0].startswith(sentence)
    assert trouble(schema)
    assert not sentence.startswith("`") or not trouble(found.schema)


def kind(value: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"]}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "string"}, {"type": "integer"}, {"enum": [None, "x"], "type": "null"}]},
        {"oneOf": [kind("a"), kind("b")]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": kind("a"), "b": kind("b")}},
        {"oneOf": [{"const": 1}, {"enum": [2, 3]}]},
        {"uniqueItems": False, "type": "array"},
        {"properties": {"not": {"type": "string"}, "if": {}}, "default": {"uniqueItems": True}},
        {"x-order": 1, "deprecated": True, "markdownDescription": "x", "title": "not", "$dynamicAnchor": "a"},
        {"type": "string", "format": "date-time", "pattern": "^2"},
        {"$ref": "#/$defs/List[int]", "$defs": {"List[int]": {"type": "array"}}},
        {"$ref": "http://x/a#/definitions/b c", "$id": "http://x/a", "definitions": {"b c": {"type": "null"}}},
    ],
)
def test_what_can_be_enforced_is_not_left_out(schema: dict[str, Any]) -> None:
    assert EnforceableSchema(schema).left_out == []


WORDS = st.sampled_from(
    [
        ("uniqueItems", True), ("not", {"type": "null"}), ("if", {}), ("then", {}), ("contains", {"type": "null"}),
        ("propertyNames", {"maxLength": 2}), ("format", "regex"), ("format", "email"), ("minContains", 2),
        ("dependentSchemas", {"a": {}}), ("unevaluatedProperties", False), ("description", "uniqueItems"),
        ("$recursiveRef", "#"), ("pattern", "(?<=a)b"), ("x-own", 1), ("$dynamicRef", "#a"),
    ]
)  # fmt: skip
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(st.just("title"), st.text(max_size=3)),
    lambda inner: st.builds(
        lambda words, place: {**place, **dict(words)},
        st.lists(WORDS, max_size=2),
        st.builds(lambda one: {"items": one}, inner)
        | st.builds(lambda members: {"properties": members}, st.dictionaries(st.sampled_from("abc"), inner, max_size=2))
        | st.builds(lambda branches: {"anyOf": branches}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda branches: {"oneOf": branches}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@settings(max_examples=examples(300))
@given(schema=SCHEMAS)
def test_what_is_left_compiles(schema: dict[str, Any]) -> None:
    found = EnforceableSchema(schema)
    named = [sentence for sentence in found.left_out if sentence.startswith(("Unimplemented", "Unknown"))]
    assert named or not trouble(found.schema), found.left_out
    again = EnforceableSchema(found.schema)
    assert (again.schema, again.left_out) == (found.schema, named)
    assert found.left_out or not trouble(schema)


# --- as clients see it -----------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]
TAGS = {"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
SENTENCE = 'Unimplemented keys: ["uniqueItems"]'


def formats(strict: bool | None) -> dict[str, dict[str, Any]]:
    """The same schema in every dialect."""
    given = {"schema": TAGS, "name": "n"} | ({} if strict is None else {"strict": strict})
    body: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {
            "messages": HI, "response_format": {"type": "json_schema", "json_schema": given},
        },
        "/v1/completions": {"prompt": "Hi", "response_format": {"type": "json_schema", "json_schema": given}},
        "/v1/responses": {"input": "Hi", "text": {"format": {"type": "json_schema", **given}}},
    }  # fmt: skip
    if not strict:
        output = {"format": {"type": "json_schema", "schema": TAGS}}
        body["/v1/messages"] = {"messages": HI, "max_tokens": 99, "output_config": output}
    return body


@pytest.mark.parametrize("strict", [None, False])
def test_what_is_ignored_is_said_in_every_dialect(client: TestClient, engine: FakeEngine, strict: bool | None) -> None:
    for path, body in formats(strict).items():
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        (warning,) = answer.json()["warnings"]
        assert warning.endswith(f": {SENTENCE}"), path
        assert engine.requests[-1].constraint is not None
        stream = client.post(path, json={**body, "stream": True}).text
        told = events(stream)[-2] if path.endswith("completions") else named_events(stream)
        if isinstance(told, list):
            told = next(event.get("response", event) for event in reversed(told) if "specprefill" in json.dumps(event))
        assert told["warnings"] == [warning]
    assert "warnings" not in client.post("/v1/chat/completions", json={"messages": HI}).json()


def test_strict_schemas_are_refused_by_keyword_and_place(client: TestClient, engine: FakeEngine) -> None:
    for path, body in formats(strict=True).items():
        answer = client.post(path, json=body)
        assert answer.status_code == 400, path
        error = answer.json()["error"]
        assert error["message"] == f"{error['param']}: {SENTENCE}"
    assert not engine.requests


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "label"}}])
def test_forced_tools_are_named(client: TestClient, engine: FakeEngine, choice: Any) -> None:
    def post(strict: bool | None) -> Any:
        function = {"name": "label", "parameters": TAGS} | ({} if strict is None else {"strict": strict})
        body = {"messages": HI, "tools": [{"type": "function", "function": function}], "tool_choice": choice}
        return client.post("/v1/chat/completions", json=body)

    engine.says('<tool_call>\n{"name": "label", "arguments": {}}\n</tool_call>')
    for strict in (None, False):
        assert f"tools: label: {SENTENCE}" in post(strict).json()["warnings"]
    refused = post(strict=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"tools: label: {SENTENCE}"
