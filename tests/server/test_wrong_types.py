"""Every place of a full request of every endpoint, with values of every other JSON type: never a 5xx."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.big_json import DEEPEST
from tests.support.bad_bodies import changed, places

from .conftest import client_of
from .fakes import FakeEngine
from .test_decisions import decides

VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 2**63, 1e308, "", "x", "null", [], [[]], [1], ["x"], [None], [{}], {}, {"x": 1},
    {"x": [{}]}, {"$ref": "#"}, {"$ref": 1},
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "enum": ["x", "y"], "pattern": "x"},
        "b": {"$ref": "#/$defs/d"},
        "c": {"type": "array", "items": {"oneOf": [{"const": 1}, {"enum": [2, "3"]}]}, "minItems": 1, "maxItems": 3},
        "d": {"type": "object", "properties": {"e": {"type": ["integer", "null"]}}, "additionalProperties": False},
    },
    "patternProperties": {"^x": {"format": "date"}},
    "required": ["a"],
    "additionalProperties": {"allOf": [{"prefixItems": [{}]}]},
    "$defs": {"d": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": "Hi", "name": "u"},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]},
]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": False}}
CHAT = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 1}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "content": [], "summary": [{"type": "summary_text", "text": "x"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}]},
]
CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        {"messages": MESSAGES[:2], "response_format": FORMAT, "max_tokens": 1},
        {**CHAT, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}},
    ],
    "/v1/completions": [{"prompt": [[1, 2]], "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}],
    "/v1/responses": [
        {
            "input": ITEMS,
            "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", **TOOL["function"]}]}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 1,
        }
    ],
    "/v1/messages": [
        {
            "messages": BLOCKS,
            "system": [{"type": "text", "text": "s"}],
            "tools": [CLAUDE_TOOL],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1},
            "max_tokens": 1,
        }
    ],
    "/v1/specprefill/explain": [{"messages": MESSAGES[:2], "chat_template_kwargs": {"a": 1}}],
    "/apply-template": [{"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"a": 1}}],
    "/tokenize": [{"content": "a"}],
    "/detokenize": [{"tokens": [1, 2]}],
}
COUNTS = {f"{path}/input_tokens": path for path in ("/v1/chat/completions", "/v1/responses")}
BODIES["/v1/decisions"] = [
    {
        "input": ITEMS,
        "questions": [
            {"type": "predicate", "instructions": "It rains."},
            {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]},
            {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "top"}]},
        ],
    }
]
BODIES |= {count: BODIES[path][:1] for count, path in COUNTS.items()}
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]


@pytest.fixture(scope="module")
def lasting() -> Iterator[TestClient]:
    engine = FakeEngine()
    engine.script = lambda request: decides(request) if request.questions else engine.tokens("Hello")
    yield client_of(engine)
    engine.close()


def documented(client: TestClient, path: str) -> list[str]:
    document = client.app.openapi()  # type: ignore[attr-defined]
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return list(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])


def answers(client: TestClient, path: str, body: Any) -> None:
    answer = client.post(path, content=orjson.dumps(body))
    assert answer.status_code < 500, (path, body, answer.text)


def test_every_endpoint_with_a_body_is_here(lasting: TestClient) -> None:
    document = lasting.app.openapi()  # type: ignore[attr-defined]
    assert set(BODIES) == {path for path, on in document["paths"].items() if "requestBody" in on.get("post", {})}


@pytest.mark.parametrize("path", BODIES)
def test_the_whole_bodies_are_answered(lasting: TestClient, path: str) -> None:
    for body in BODIES[path]:
        answer = lasting.post(path, content=orjson.dumps(body))
        assert answer.status_code == 200, answer.text


def every_place(client: TestClient, path: str) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    fields = documented(client, path)
    for body in BODIES[path]:
        for way in dict.fromkeys([*places(body), *((name,) for name in fields)]):
            yield body, way


@pytest.mark.extended
@pytest.mark.parametrize("path", BODIES)
def test_no_type_in_any_place_is_a_failure_of_the_server(lasting: TestClient, path: str) -> None:
    """Two values in a place, others in the next: each value in many places."""
    values = itertools.cycle(VALUES)
    for body, way in every_place(lasting, path):
        for value in itertools.islice(values, 2):
            answers(lasting, path, changed(body, way, value))


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_field_is_named_as_the_body_has_it(lasting: TestClient, path: str) -> None:
    """Without the parts of the server's own types."""
    for name in documented(lasting, path):
        for value in (5, "x", True, 1.5):
            answer = lasting.post(path, content=orjson.dumps({**BODIES[path][0], name: value}))
            assert answer.status_code == 200 or f'"{name}.' not in answer.text, answer.text


def test_a_tool_without_a_name_is_none(lasting: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": ""}}]
    answer = lasting.post("/v1/chat/completions", json={**CHAT, "tools": tools})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.name")


READ = 120  # levels of a schema that llguidance reads


@pytest.mark.parametrize("levels", [READ, DEEPEST - 5, DEEPEST, DEEPEST + 1, 700, 1020, 5000])
@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"anyOf":[', "]}"), ('{"items":', "}")])
def test_json_in_a_text_is_limited_like_the_body(lasting: TestClient, levels: int, opens: str, closes: str) -> None:
    count = (levels - 1) // sum(map(opens.count, "[{"))
    text = opens * count + "{}" + closes * count
    call = {"id": "c", "function": {"name": "f", "arguments": text}}
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    answers(lasting, "/v1/chat/completions", {"messages": talk, "max_tokens": 1})
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
    answers(lasting, "/v1/responses", {"input": [item]})
    for asked in ({"json_schema": text}, {"structured_outputs": {"json": text}}):
        answer = lasting.post("/v1/chat/completions", json={"messages": talk[:1], "max_tokens": 1, **asked})
        assert answer.status_code == (400 if levels > READ or opens == "[" else 200), answer.text
