"""Histories that agents send with every request, in all dialects: a refusal would be the session's end."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.big_json import dumps, loads
from mlx_specprefill_server.prompt.form_probe import ODD_TOOLS

from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS

CITIES = {"c1": "Paris", "c2": "Rome", "c3": "Oslo"}
ASKED = {"role": "user", "content": "Weather?"}
LONG = 123456789012345678901234567890
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
DIALECTS = [CHAT, MESSAGES, RESPONSES]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"])))
    yield fake
    fake.close()


def prompt(engine: FakeEngine) -> str:
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def ask(client: TestClient, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    answer = client.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert answer.status_code == 200, answer.text
    out: dict[str, Any] = answer.json()
    return out


def chat(order: tuple[str, ...]) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": city})}}
        for name, city in CITIES.items()
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": f"in {CITIES[name]}"} for name in order]
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}, *results]}


def messages(order: tuple[str, ...]) -> dict[str, Any]:
    calls = [{"type": "tool_use", "id": name, "name": "f", "input": {"city": city}} for name, city in CITIES.items()]
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"in {CITIES[name]}"} for name in order]
    turns = [ASKED, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    return {"max_tokens": 9, "messages": turns}


def responses(order: tuple[str, ...]) -> dict[str, Any]:
    calls = [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": json.dumps({"city": city})}
        for name, city in CITIES.items()
    ]
    results = [{"type": "function_call_output", "call_id": name, "output": f"in {CITIES[name]}"} for name in order]
    return {"input": [ASKED, *calls, *results]}


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (MESSAGES, messages), (RESPONSES, responses)])
def test_results_in_any_order_make_one_prompt(client: TestClient, engine: FakeEngine, path: str, body: Any) -> None:
    for order in itertools.permutations(CITIES):
        ask(client, path, body(order))
    whole = {tuple(request.prompt) for request in engine.requests}
    assert len(whole) == 1
    places = [prompt(engine).index(f"in {city}") for city in CITIES.values()]
    assert places == sorted(places)


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (MESSAGES, messages), (RESPONSES, responses)])
def test_a_missing_result_leaves_its_place(client: TestClient, engine: FakeEngine, path: str, body: Any) -> None:
    ask(client, path, body(("c3", "c2")))
    results = prompt(engine).split("<|im_start|>tool\n")[1:]
    assert [result.split("<|im_end|>")[0] for result in results] == ["[no result]", "in Rome", "in Oslo"]


# --- images, and what only the provider can read ----------------------------------------------------------------------

WITH_IMAGE = {
    CHAT: {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "data:"}}]}]},
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "text", "text": "See"}, {"type": "image", "source": {"type": "base64", "data": "x"}}]}]},
    RESPONSES: {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": "data:"}]}]},
}  # fmt: skip


@pytest.mark.parametrize("path", DIALECTS)
def test_an_image_is_named_in_its_place_and_in_the_warnings(client: TestClient, engine: FakeEngine, path: str) -> None:
    answer = ask(client, path, WITH_IMAGE[path])
    place = "input[0].content[1]" if path == RESPONSES else "messages[0].content[1]"
    assert answer["warnings"] == [f"{place}: an image was left out: this model reads text only"]
    assert "See\n[image left out: this model reads text only]<|im_end|>" in prompt(engine)


def test_blocks_of_mcp_servers_are_left_out_and_named(client: TestClient, engine: FakeEngine) -> None:
    blocks = [
        {"type": "mcp_tool_use", "id": "m", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "x"}]},
        {"type": "text", "text": "Done."},
    ]
    turns = [ASKED, {"role": "assistant", "content": blocks}, {"role": "user", "content": "Thanks."}]
    answer = ask(client, MESSAGES, {"max_tokens": 9, "messages": turns})
    assert [warning.split(" ")[:2] for warning in answer["warnings"]] == [
        ["messages[1].content[0]:", "mcp_tool_use"],
        ["messages[1].content[1]:", "mcp_tool_result"],
    ]
    assert "<|im_start|>assistant\nDone.<|im_end|>" in prompt(engine)


@pytest.mark.parametrize("kind", ["container_upload", "tool_reference"])
def test_a_message_of_which_nothing_is_shown_keeps_its_place(client: TestClient, engine: FakeEngine, kind: str) -> None:
    """Without it the answer before it would go on."""
    turns = [ASKED, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": [{"type": kind}]}]
    answer = ask(client, MESSAGES, {"max_tokens": 9, "messages": turns})
    last = prompt(engine).rsplit("<|im_start|>", 2)[1:]
    assert [message.split("\n")[0] for message in last] == ["user", "assistant"]
    assert f"[{kind} left out" in last[0]
    (warning,) = answer["warnings"]
    assert warning.startswith("messages[2].content[0]: ")
    assert f"{kind} was left out" in warning


# --- JSON -------------------------------------------------------------------------------------------------------------

HALVES = {
    CHAT: rb'{"messages": [{"role": "user", "content": "cut \ud83d"}], "metadata": {"t": "\udc00"}}',
    MESSAGES: rb'{"max_tokens": 9, "messages": [{"role": "user", "content": "cut \ud83d"}]}',
    RESPONSES: rb'{"input": [{"role": "user", "content": "cut \ud83d"}], "metadata": {"\ud83d": "x"}}',
}


@pytest.mark.parametrize("path", DIALECTS)
def test_half_a_surrogate_pair_is_a_replacement_character(client: TestClient, engine: FakeEngine, path: str) -> None:
    ask(client, path, HALVES[path])
    assert "cut \ufffd<|im_end|>" in prompt(engine)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\ude00 \uD83D\uDE00 \ud83d\ud83d\ude00"', "\ufffd \U0001f600 \ufffd\U0001f600"),
        (rb'"\\ud83d \\\ud83d"', "\\ud83d \\\ufffd"),
        (b"[18446744073709551615, -%d]" % LONG, [2**64 - 1, -LONG]),
        (b'{"text": ": %d", "n": %d}' % (LONG, LONG), {"text": f": {LONG}", "n": LONG}),
    ],
)
def test_json_as_clients_write_it(text: bytes, value: Any) -> None:
    assert loads(text) == value
    assert loads(dumps(value)) == value


@pytest.mark.parametrize("text", [b"", b"{", rb'"\ud83', b"[NaN]", b'"\xff"', b"[%d" % LONG])
def test_what_is_no_json(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)


def test_integers_are_digit_for_digit(client: TestClient, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**64}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    function = {"name": "f", "arguments": f'{{"n": {LONG}}}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    turns = [ASKED, called, {"role": "tool", "tool_call_id": "c", "content": "ok"}]
    ask(client, CHAT, {"messages": turns, "tools": tools, "tool_choice": "required"})
    assert f'"n": {LONG}' in prompt(engine)
    assert f'"maximum": {2**64}' in prompt(engine)
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"n": LONG}}]}
    ask(client, MESSAGES, {"max_tokens": 9, "messages": [ASKED, used, ASKED]})
    assert f'"n": {LONG}' in prompt(engine)
    echoed = ask(client, RESPONSES, {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]})
    assert echoed["tools"][0]["parameters"] == schema


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_any_tool_is_taken(engine: FakeEngine, name: str) -> None:
    engine.pair.tokenizer = byte_tokenizer(FORMS[name])
    for tool in ODD_TOOLS:
        ask(client_of(engine), CHAT, {"messages": [ASKED], "tools": [tool]})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("all is shown", {"definitions": True, "calls": True, "results": True, "parallel": True}),
        ("the first call", {"definitions": True, "calls": True, "results": True, "parallel": False}),
        ("no calls", {"definitions": True, "calls": False, "results": True, "parallel": False}),
        ("no calls, no results", {"definitions": False, "calls": False, "results": False, "parallel": False}),
    ],
)
def test_the_list_of_models_says_what_is_shown(engine: FakeEngine, name: str, shown: dict[str, bool]) -> None:
    engine.pair.tokenizer = byte_tokenizer(FORMS[name])
    (model,) = client_of(engine).get("/v1/models").json()["data"]
    assert model["tools"] == shown | {"parsed": "none"}


def test_a_text_that_a_template_leaves_out_is_named(engine: FakeEngine) -> None:
    without = FORMS["all is shown"].replace("for m in messages", "for m in messages if 'secret' not in m.content")
    engine.pair.tokenizer = byte_tokenizer(without)
    answer = ask(client_of(engine), CHAT, {"messages": [ASKED, {"role": "user", "content": "A secret."}]})
    assert answer["warnings"] == ["the model's chat template leaves out a message (user): 'A secret.'"]


def test_calls_that_are_written_are_told(engine: FakeEngine) -> None:
    engine.pair.tokenizer = byte_tokenizer(FORMS["no calls"])
    client = client_of(engine)
    assert "warnings" not in ask(client, CHAT, {"messages": [ASKED]})
    [warning] = ask(client, CHAT, chat(("c1", "c2", "c3")))["warnings"]
    assert warning == "the model's chat template shows no tool calls: those of the conversation are written as text"
    assert '{"name": "f", "arguments": {"city": "Paris"}}' in prompt(engine)


# --- agents -----------------------------------------------------------------------------------------------------------

READ = {"name": "read", "description": "Reads.", "parameters": {"type": "object", "properties": {}}}
BOTH = [("call_1", "M1M"), ("call_2", "M2M")]
CALLS_OF_CHAT = [
    {"id": name, "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": mark})}}
    for name, mark in BOTH
]
# The second request of a session, in the shape in which each agent sends it.
AGENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Claude Code": (MESSAGES, {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "M0M", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "read", "description": "Reads.", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "M3M"}, {"type": "text", "text": "M4M"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Both.", "signature": "s"},
                {"type": "text", "text": "M5M"},
                *({"type": "tool_use", "id": name, "name": "read", "input": {"path": mark}} for name, mark in BOTH),
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_2", "content": [{"type": "text", "text": "M6M"}]},
                {"type": "tool_result", "tool_use_id": "call_1", "content": "M7M", "is_error": True},
                {"type": "text", "text": "<system-reminder>M8M</system-reminder>"},
            ]},
        ],
    }),
    "Codex": (RESPONSES, {
        "instructions": "M0M",
        "tools": [{"type": "function", "strict": False, **READ}, {"type": "web_search"}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "M3M"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "M4M"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "M5M"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Both."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "M6M"}]},
            *({"type": "function_call", "call_id": name, "name": "read", "arguments": json.dumps({"path": mark})}
              for name, mark in BOTH),
            {"type": "function_call_output", "call_id": "call_2", "output": "M7M"},
            {"type": "function_call_output", "call_id": "call_1", "output": "M8M"},
        ],
    }),
    "opencode": (CHAT, {
        "tools": [{"type": "function", "function": READ}],
        "messages": [
            {"role": "system", "content": "M0M"},
            {"role": "user", "content": "M3M"},
            {"role": "assistant", "content": "", "reasoning_content": "Both.", "tool_calls": CALLS_OF_CHAT},
            {"role": "tool", "tool_call_id": "call_1", "content": "M4M"},
            {"role": "tool", "tool_call_id": "call_2", "content": "M5M"},
            {"role": "user", "content": "M6M"},
        ],
    }),
    "Qwen Code": (CHAT, {
        "tools": [{"type": "function", "function": READ}],
        "messages": [
            {"role": "system", "content": "M0M"},
            {"role": "user", "content": [{"type": "text", "text": "M3M"}]},
            {"role": "assistant", "content": "M4M"},
            {"role": "user", "content": [{"type": "text", "text": "M5M"}]},
            {"role": "assistant", "content": None, "tool_calls": CALLS_OF_CHAT},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "M6M"}]},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "M7M"}]},
        ],
    }),
}  # fmt: skip


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", FORMS)
def test_the_second_request_of_an_agent_is_whole(engine: FakeEngine, name: str, agent: str) -> None:
    engine.pair.tokenizer = byte_tokenizer(FORMS[name])
    path, body = AGENTS[agent]
    ask(client_of(engine), path, body)
    marks = re.findall("M[0-9]M", prompt(engine))
    assert sorted(marks) == sorted(re.findall("M[0-9]M", json.dumps(body)))
    assert marks.index("M1M") < marks.index("M2M")
