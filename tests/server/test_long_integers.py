"""Whole numbers of any length in a call: from the model to the client, and back to the template, digit for digit."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server import big_json
from mlx_specprefill_server.big_json import DEEPEST, dumps, loads, restored
from mlx_specprefill_server.generation import generation

from .canned_answers import named_events
from .conftest import client_of, events
from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS
from .notations import as_json, exactly

CHAT, MESSAGES, RESPONSES = DIALECTS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
ASKED = {"role": "user", "content": "q"}
SCHEMA = {"type": "object"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASKS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [ASKED], "tools": [FUNCTION], "max_tokens": 25_000},
    MESSAGES: {"messages": [ASKED], "tools": [{"name": "f", "input_schema": SCHEMA}], "max_tokens": 25_000},
    RESPONSES: {"input": [ASKED], "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 25_000},
}
FORCED = {CHAT: "required", MESSAGES: {"type": "any"}, RESPONSES: "required"}
DIGITS = [20, 309, 310, 617, 5000]
NUMBERS = [sign + "7" * digits for digits in DIGITS for sign in ("", "-")]
NESTINGS = ['{"n": @}', '{"n": [1, {"m": @}], "t": "x"}']
ARGUMENTS = [NESTINGS[at % 4 // 2].replace("@", number) for at, number in enumerate(NUMBERS)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    monkeypatch.setattr(generation, "STREAM_BUFFER", 65_536)  # this engine says everything at once
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"]), 65_536))
    yield fake
    fake.close()


def prompt(engine: FakeEngine) -> str:
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def post(client: TestClient, path: str, body: bytes) -> Any:
    answer = client.post(path, content=body)
    assert answer.status_code == 200, answer.text[:300]
    return answer


def streamed(path: str, text: str) -> str:
    """Return the arguments in a stream's deltas."""
    if path == CHAT:
        deltas = [choice["delta"] for event in events(text)[:-1] for choice in event["choices"]]
        return "".join(call["function"].get("arguments", "") for d in deltas for call in d.get("tool_calls") or ())
    payloads = named_events(text)
    if path == MESSAGES:
        return "".join(event["delta"].get("partial_json", "") for event in payloads if "delta" in event)
    return "".join(e["delta"] for e in payloads if e["type"] == "response.function_call_arguments.delta")


def whole(path: str, body: bytes) -> str:
    """Return the arguments in a response."""
    answer = exactly(body.decode())
    if path == MESSAGES:
        return as_json(answer["content"][0]["input"])
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"] if path == CHAT else answer["output"][0]
    return str(call["arguments"])


def history(path: str, arguments: str) -> bytes:
    function = {"name": "f", "arguments": arguments}
    turns: list[dict[str, Any]] = {
        CHAT: [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}],
        MESSAGES: [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "@"}]}],
        RESPONSES: [{"type": "function_call", "call_id": "c", **function}],
    }[path]
    name = "input" if path == RESPONSES else "messages"
    body = ASKS[path] | {name: [ASKED, *turns, ASKED]}
    return json.dumps(body).replace('"input": "@"', f'"input": {arguments}').encode()


@pytest.mark.parametrize("path", DIALECTS)
def test_every_digit_arrives_at_the_client_and_at_the_template(path: str, engine: FakeEngine) -> None:
    client = client_of(engine)
    for arguments in ARGUMENTS:
        engine.says(f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>')
        assert whole(path, post(client, path, dumps(ASKS[path])).content) == arguments
        assert streamed(path, post(client, path, dumps(ASKS[path] | {"stream": True})).text) == arguments
        assert whole(path, post(client, path, dumps(ASKS[path] | {"tool_choice": FORCED[path]})).content) == arguments
        engine.says("Done.")
        post(client, path, history(path, arguments))
        assert arguments in prompt(engine)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_template_shows_every_digit(form: str, engine: FakeEngine) -> None:
    engine.pair.tokenizer = byte_tokenizer(FORMS[form])
    client = client_of(engine)
    shown = []
    for number in ("47119", *NUMBERS):
        post(client, MESSAGES, history(MESSAGES, f'{{"n": {number}}}'))
        shown.append(number in prompt(engine))
    assert len(set(shown)) == 1


def test_calls_of_the_clients_own_search_and_of_custom_tools_have_them_too(engine: FakeEngine) -> None:
    client, arguments = client_of(engine), f'{{"goal": "a", "n": {"7" * 5000}}}'
    engine.says(f'<tool_call>\n{{"name": "tool_search", "arguments": {arguments}}}\n</tool_call>')
    for most in (7, 2**64):  # the answer repeats it, and orjson doesn't write the second
        later = {"type": "function", "name": "w", "defer_loading": True, "parameters": {"maximum": most}}
        asked = {"input": "q", "tools": [later, {"type": "tool_search", "execution": "client"}]}
        answer = post(client, RESPONSES, dumps(asked | {"max_output_tokens": 9000}))
        assert as_json(exactly(answer.text)["output"][0]["arguments"]) == arguments
    engine.says(f'<tool_call>\n{{"name": "p", "arguments": {{"input": "a", "n": {"7" * 5000}}}}}\n</tool_call>')
    custom = {"input": "q", "tools": [{"type": "custom", "name": "p"}], "max_output_tokens": 9000}
    assert post(client, RESPONSES, dumps(custom)).json()["output"][0]["input"] == "a"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_value_is_read_and_written_without_a_change(number: str) -> None:
    text = f'{{"a":[{number},1.5],"b":"{number}"}}'
    assert dumps(loads(text)).decode() == text
    assert dumps(copy.deepcopy(loads(text))).decode() == text
    assert repr(loads(text)["a"][0]) == number


def test_a_stand_in_means_nothing_without_its_number() -> None:
    value = loads(f"[{'7' * 5000}]")
    shown = json.dumps(value)
    assert restored(shown) == f"[{'7' * 5000}]"
    del value
    gc.collect()
    assert restored(shown) == shown
    assert not big_json._known


NO_JSON = ["[{n}, NaN]", "[{n}, -Infinity]", "[{n}, 1e999]", "[{n}", "[{n},]", "[0{n}]", '[{n}, "\xff\ud83d']
TOO_DEEP = ["[" * depth + "1" + "]" * depth for depth in (DEEPEST + 1, 900, 1100, 100_000)]


@pytest.mark.parametrize("digits", DIGITS)
def test_what_orjson_refuses_else_is_refused_beside_them(digits: int) -> None:
    for text in [*NO_JSON, *(f"[{{n}}, {deep}]" for deep in TOO_DEEP)]:
        with pytest.raises(ValueError, match=r"."):
            loads(text.replace("{n}", "7" * digits).encode("utf-8", "surrogatepass"))
    assert loads(f"[{'7' * digits}, {'[' * (DEEPEST - 1)}{']' * (DEEPEST - 1)}]")


PLACES = [
    *("temperature", "top_k", "seed", "n", "max_tokens", "max_output_tokens", "logit_bias", "stop_token_ids", "stop"),
    *("specprefill_keep_pct", "metadata", "thinking", "model", "messages", "input", "prompt", "documents", "tools"),
]


@pytest.mark.parametrize("path", [*DIALECTS, "/v1/completions"])
def test_elsewhere_they_are_values_like_others(path: str, engine: FakeEngine) -> None:
    client = client_of(engine)
    base = ASKS.get(path, {"prompt": "q"}) | {"max_tokens": 3}
    limits = {"type": "object", "properties": {"n": {"type": "integer", "maximum": "@"}}}
    shapes: list[Any] = ["@", ["@"], {"1": "@"}, {"budget_tokens": "@"}]
    bodies = [base | {place: shape} for place in PLACES for shape in shapes]
    bodies += [base | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": limits}}}]
    bodies += [base | {"output_config": {"format": {"type": "json_schema", "schema": limits}}}]
    for choice in ("auto", "required", {"type": "any"}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": limits}, "name": "f"}]
        tools[0] |= {"parameters": limits, "input_schema": limits} | ({} if path != MESSAGES else {"type": "custom"})
        bodies += [base | {"tools": tools, "tool_choice": choice}]
    for body in bodies:
        for number in ("7" * 310, "-" + "7" * 5000):
            answer = client.post(path, content=json.dumps(body).replace('"@"', number).encode())
            assert answer.status_code in (200, 400), (body, answer.text[:300])
            assert big_json.MARK not in answer.text
