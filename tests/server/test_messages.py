"""Anthropic's dialect: bodies in, wire bytes out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from mlx_specprefill import Failed, InvalidRequestError, Progress
from mlx_specprefill_server import request_body
from mlx_specprefill_server.anthropic import messages as endpoint
from mlx_specprefill_server.anthropic.messages import MessageAnswer
from mlx_specprefill_server.anthropic.protocol import MessagesRequest
from mlx_specprefill_server.deltas import AnswerDelta, CallBroken, Idle
from mlx_specprefill_server.http.errors import JsonResponse
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.settings.server import Settings

from .canned_answers import EVERYTHING, REPORT, TEXT, THOUGHT, TWO_CALLS, Given, call, done, named_events, streamed
from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer
from .templates import QWEN_3

URL = "/v1/messages"
HI: Any = [{"role": "user", "content": "Hi"}]
EVENTS: Any = TypeAdapter(RawMessageStreamEvent)


def ask(client: TestClient, **fields: Any) -> Any:
    answer = client.post(URL, json={"max_tokens": 100, "messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(client: TestClient, **fields: Any) -> str:
    answer = client.post(URL, json={"max_tokens": 100, "messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    body = answer.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    message: str = body["error"]["message"]
    return message


def answer_of(engine: FakeEngine, pieces: list[AnswerDelta], **settings: Any) -> MessageAnswer:
    body = MessagesRequest(messages=HI, max_tokens=10)
    return MessageAnswer(Service(engine, Settings(**settings)), body, Given(pieces))


def whole(engine: FakeEngine, pieces: list[AnswerDelta]) -> dict[str, Any]:
    """Return the message as clients read it."""
    sent: dict[str, Any] = json.loads(JsonResponse(asyncio.run(answer_of(engine, pieces).collect())).body)
    return sent


def accumulated(payloads: list[dict[str, Any]]) -> Message:
    """Return the SDK's message from a stream. The SDK accepts each event."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for payload in payloads:
        if payload["type"] != "ping":
            event = EVENTS.validate_python(payload, strict=True)
            message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert isinstance(message, Message)
    return message


def prompt(engine: FakeEngine) -> str:
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def test_a_whole_message(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, model="claude-x")
    Message.model_validate(body, strict=True)
    n = len(engine.requests[0].prompt)
    assert body["id"].startswith("msg_")
    expected = {
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": n - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 6,
        },
    }
    assert body.items() >= expected.items()
    assert body["specprefill"]["mode"] == "full"
    assert "timings" not in body


def test_a_streamed_message(client: TestClient, engine: FakeEngine) -> None:
    answer = client.post(URL + "?beta=true", json={"max_tokens": 9, "messages": HI, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    payloads = named_events(answer.text)
    kinds = [payload["type"] for payload in payloads]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    n = len(engine.requests[0].prompt)
    assert payloads[0]["message"]["usage"]["input_tokens"] == n
    assert payloads[-2]["usage"]["cache_read_input_tokens"] == 1
    assert payloads[-2]["specprefill"]["prompt_tokens"] == n
    assert "timings" not in answer.text.replace('"timings":{"queue_ms"', "")  # llama.cpp's; the report has its own
    message = accumulated(payloads)
    assert message.content[0].text == "Hello"
    assert message.stop_reason == "end_turn"


def test_every_kind_of_block(engine: FakeEngine) -> None:
    body = whole(engine, EVERYTHING)
    Message.model_validate(body, strict=True)
    assert body["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "mlx-specprefill"},
        {"type": "text", "text": "Good day"},
        {"type": "tool_use", "id": "call_0", "name": "read", "input": {"path": "a.txt"}},
        {"type": "tool_use", "id": "call_1", "name": "list", "input": {}},
    ]
    assert body["stop_reason"] == "tool_use"
    assert body["specprefill"] == REPORT.to_dict()
    assert body["usage"]["input_tokens"] == 70


def test_a_stream_says_what_a_whole_message_says(engine: FakeEngine) -> None:
    payloads = streamed(answer_of(engine, EVERYTHING).stream())
    message = accumulated(payloads).to_dict(mode="json")
    body = whole(engine, EVERYTHING)
    for name in ("content", "stop_reason", "stop_sequence", "role", "type", "usage"):
        assert message[name] == body[name], name
    partial = [p["delta"]["partial_json"] for p in payloads if p.get("delta", {}).get("type") == "input_json_delta"]
    assert partial == ['{"path": "a', '.txt"}', "{}"]


@pytest.mark.parametrize(
    ("end", "stop_reason", "stop_sequence"),
    [
        (done("stop"), "end_turn", None),
        (done("stop", stop_string="\n\nHuman:"), "stop_sequence", "\n\nHuman:"),
        (done("length"), "max_tokens", None),
        (done("tool_calls"), "tool_use", None),
    ],
)
def test_stop_reasons(engine: FakeEngine, end: Any, stop_reason: str, stop_sequence: str | None) -> None:
    body = whole(engine, [*TEXT, end])
    assert (body["stop_reason"], body["stop_sequence"]) == (stop_reason, stop_sequence)
    delta = streamed(answer_of(engine, [*TEXT, end]).stream())[-2]["delta"]
    assert delta == {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


@pytest.mark.parametrize(
    "number", ["18446744073709551616", "-9223372036854775809", "1e309", "0.10", "[" * 300 + "]" * 300]
)
def test_numbers_in_a_call_keep_their_digits(engine: FakeEngine, number: str) -> None:
    pieces = [*call(0, "read", f'{{"n": {number}}}'), done("tool_calls")]
    sent = JsonResponse(asyncio.run(answer_of(engine, pieces).collect())).body
    assert f'"input":{{"n": {number}}}'.encode() in sent


def test_nothing_said_is_a_message_without_blocks(engine: FakeEngine) -> None:
    assert whole(engine, [done()])["content"] == []
    assert accumulated(streamed(answer_of(engine, [done()]).stream())).content == []


def test_a_call_that_was_cut_short_is_closed(engine: FakeEngine) -> None:
    pieces = [*call(0, "read", '{"path": "a')[:-1], done("length")]
    assert whole(engine, pieces)["content"] == [{"type": "tool_use", "id": "call_0", "name": "read", "input": {}}]
    kinds = [payload["type"] for payload in streamed(answer_of(engine, pieces).stream())]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_call_that_breaks_is_no_part_of_a_whole_message(engine: FakeEngine) -> None:
    pieces = [*call(0, "read", '{"path": "a')[:-1], CallBroken(), *TEXT, done()]
    assert whole(engine, pieces)["content"] == [{"type": "text", "text": "Good day"}]
    message = accumulated(streamed(answer_of(engine, pieces).stream()))
    assert [block.type for block in message.content] == ["tool_use", "text"]


WHOLE_CALL = '<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
UNCLOSED = [
    ('<tool_call>{"name": "read", "arguments": {', "end_turn"),  # nothing of it has gone out
    ('<tool_call>{"name": "read", "arguments": {"path": "a', "max_tokens"),
    ('<tool_call>{"name": "read", "arguments": {"path": "a", ', "max_tokens"),
    (WHOLE_CALL + '<tool_call>{"name": "read", ', "tool_use"),
    (WHOLE_CALL + '<tool_call>{"name": "read", "arguments": {"path": "b', "max_tokens"),
]


@pytest.mark.parametrize(("text", "stop"), UNCLOSED)
def test_input_that_is_unfinished_never_comes_with_a_normal_stop(
    client: TestClient, engine: FakeEngine, text: str, stop: str
) -> None:
    """Agents run what stands in a tool_use block when the answer seems to have ended well."""
    engine.says(text)
    tools = [{"name": "read", "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}}}]
    body = {"max_tokens": 300, "messages": HI, "tools": tools, "stream": True}
    message = accumulated(named_events(client.post(URL, json=body).text))
    announced = sum(block.type == "tool_use" for block in message.content)
    assert message.stop_reason == stop
    assert stop == "max_tokens" or announced == text.count("</tool_call>")
    answered = ask(client, tools=tools, max_tokens=300)
    inputs = [block["input"] for block in answered["content"] if block["type"] == "tool_use"]
    assert inputs == [{"path": "a"}] * text.count("</tool_call>")
    assert answered["stop_reason"] == ("tool_use" if inputs else "end_turn")


def test_pings_fill_silence_and_content_is_stirred_before_clients_give_up(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 50))
    monkeypatch.setattr(endpoint, "monotonic", lambda: next(clock))
    idle: list[AnswerDelta] = [Idle()] * 8
    given = [Progress("prefill", 1, 2), *idle, *TEXT, done()]
    payloads = streamed(answer_of(engine, given).stream())
    assert sum(payload["type"] == "ping" for payload in payloads) == 9
    empty = [payload for payload in payloads if payload.get("delta") == {"type": "thinking_delta", "thinking": ""}]
    assert 2 <= len(empty) < 8
    assert accumulated(payloads).content[-1].text == "Good day"


@pytest.mark.parametrize(
    ("before", "thinks", "delta"),
    [
        ([], True, {"type": "thinking_delta", "thinking": ""}),
        ([], False, {"type": "text_delta", "text": ""}),
        (THOUGHT, False, {"type": "thinking_delta", "thinking": ""}),
        (TWO_CALLS[:2], True, {"type": "input_json_delta", "partial_json": ""}),
        (TWO_CALLS, False, {"type": "text_delta", "text": ""}),
    ],
)
def test_stirring_suits_the_open_block(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, before: Any, thinks: bool, delta: Any
) -> None:
    monkeypatch.setattr(endpoint, "STIR_AFTER_S", 0)
    answer = answer_of(engine, [*before, Idle(), *TEXT, done()])
    answer._thinks = thinks
    payloads = streamed(answer.stream())
    assert delta in [payload.get("delta") for payload in payloads]
    assert accumulated(payloads).content[-1].text == "Good day"


def test_a_failure_in_a_stream_is_its_last_event(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens("He", end=False), RuntimeError("boom")]
    answer = client.post(URL, json={"max_tokens": 9, "messages": HI, "stream": True})
    payloads = named_events(answer.text)
    assert [payload["type"] for payload in payloads[-2:]] == ["content_block_stop", "error"]
    last = payloads[-1]
    ErrorResponse.model_validate(last, strict=True)
    assert last["error"]["type"] == "api_error"
    assert "boom" in last["error"]["message"]
    assert last["specprefill"]["reason"].startswith("failed: ")
    assert accumulated(payloads[:-1]).content[0].text == "He"


def test_a_failure_of_a_whole_message_has_a_status(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [RuntimeError("boom")]
    answer = client.post(URL, json={"max_tokens": 9, "messages": HI})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-should-retry"] == "false"
    engine.script = lambda request: [Failed(InvalidRequestError("too big"))]
    assert client.post(URL, json={"max_tokens": 9, "messages": HI}).status_code == 400
    engine.full = True
    full = client.post(URL, json={"max_tokens": 9, "messages": HI})
    assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
    assert full.headers["retry-after"]


GONE = [{"type": "text", "text": "gone"}]


def test_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3; cch=abc"},
        {"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Read it."}]},
        {"role": "system", "content": "Be kind."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "thinking", "signature": "s"},
                {"type": "thinking", "thinking": None},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": GONE, "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]  # fmt: skip
    ask(client, system=system, messages=messages)
    assert prompt(engine) == (
        "<|im_start|>system\nYou are terse.<|im_end|>\n"
        "<|im_start|>user\n<system-reminder>\nBe kind.\n</system-reminder>\n\nRead it.<|im_end|>\n"
        "<|im_start|>assistant\nReading.<|im_end|>\n"
        '<|im_start|>user\n{"name": "read", "arguments": {"path": "a"}}<|im_end|>\n'
        "<|im_start|>tool\nError: gone<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = ask(
        client, temperature=0.5, top_p=0.9, top_k=7, max_tokens=32000, stop_sequences=["l"], specprefill=True,
        specprefill_keep_pct=0.5, specprefill_return_spans=True, metadata={"user_id": "x"}, service_tier="auto",
        context_management={"edits": []}, cache_control={"type": "ephemeral"}, unknown=[1], system=None, tools=None,
    )  # fmt: skip
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 7)
    assert request.max_tokens == engine.pair.context_length - len(request.prompt)
    assert body["specprefill"]["mode"] == "sparse"
    assert body["specprefill"]["kept_spans"] == [[0, len(request.prompt) // 2]]
    assert body["content"] == [{"type": "text", "text": "He"}]


def test_an_output_format_constrains_the_answer(client: TestClient, engine: FakeEngine) -> None:
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    ask(client, output_format=format_)
    assert engine.requests[-1].constraint.field == "output_format.schema"
    body = ask(client, response_format=format_, structured_outputs={"json": {}})
    assert engine.requests[-1].constraint is None
    assert [sentence.split()[0] for sentence in body["warnings"]] == ["response_format", "structured_outputs"]
    ask(client, output_config={"format": format_})
    constraint = engine.requests[-1].constraint
    assert constraint is not None
    assert constraint.field == "output_config.format.schema"


def test_tools_that_must_not_be_called_are_not_shown(engine: FakeEngine) -> None:
    engine.pair = FakePair(byte_tokenizer(QWEN_3))
    client = client_of(engine)
    tools = {"tools": [{"name": "read", "input_schema": {"type": "object"}}]}
    bare, shown, hidden = (
        client.post(f"{URL}/count_tokens", json={"messages": HI, **fields}).json()["input_tokens"]
        for fields in ({}, tools, tools | {"tool_choice": {"type": "none"}})
    )
    assert bare == hidden < shown


def test_a_prompt_that_is_too_long(client: TestClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    message = refusal(client, messages=messages)
    n = client.post(f"{URL}/count_tokens", json={"messages": messages}).json()["input_tokens"]
    assert message == f"prompt is too long: {n + 1} tokens > 4096 maximum"
    assert not engine.requests


def test_counting(client: TestClient, engine: FakeEngine) -> None:
    tools = [{"name": "read", "input_schema": {"type": "object"}}]
    fields = {"messages": HI, "system": "Be brief.", "tools": tools, "thinking": {"type": "adaptive"}}
    body = client.post(f"{URL}/count_tokens?beta=true", json=fields).json()
    MessageTokensCount.model_validate(body, strict=True)
    ask(client, **fields)
    assert body == {"input_tokens": len(engine.requests[0].prompt)}
    bare = client.post(f"{URL}/count_tokens", json={}).json()
    assert bare["error"]["message"].startswith("messages: ")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": list(blocks)}


CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}


def test_what_a_tool_returned_besides_text_is_named_in_its_place(client: TestClient, engine: FakeEngine) -> None:
    """The history comes with every request: a refusal would be the session's end."""
    pdf = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "JVBERi0="}}
    ask(client, messages=[*HI, CALLED, {"role": "user", "content": [result(IMAGE, pdf)]}])
    assert (
        "[image left out: this model reads text only]\na.pdf\n[document left out: this model reads text only]<|im_end|>"
        in prompt(engine).replace("\n\n", "\n")
    )


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, *HI]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [*HI, CALLED]}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (said("user", "Hi"), "messages[0].content[0]"),
        (said("user", {"text": "Hi"}), "messages[0].content[0].type"),
        (said("user", {"type": "text"}), "messages[0].content[0].text"),
        (said("user", {"type": "what"}), "messages[0].content[0].type"),
        (said("user", result({"type": "text"})), "messages[0].content[0].content[0].text"),
        (said("assistant", {"type": "tool_use", "id": "a", "name": "a", "input": [1]}), "messages[0].content[0].input"),
        (said("assistant", {"type": "thinking", "thinking": 1}), "messages[0].content[0].thinking"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"thinking": "on"}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "text"}, "output_config": {"format": {"type": "text"}}}, "output_format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)  # fmt: skip
def test_bad_input(client: TestClient, engine: FakeEngine, fields: dict[str, Any], field: str) -> None:
    assert refusal(client, **fields).startswith((f"{field}:", f"{field} "))
    assert not engine.requests


def test_a_body_that_is_no_json(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_LIMIT", 10)
    answer = client.post(URL, content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    large = client.post(URL, content=b"x" * 11)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    wrong = client.get(URL)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


def test_an_answer_can_be_begun(client: TestClient, engine: FakeEngine) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": '{"name": '}]}
    body = {"messages": [*HI, begun], "max_tokens": 10}
    assert client.post("/v1/messages", json=body).json()["content"] == [{"type": "text", "text": "Hello"}]
    prompt = engine.pair.tokenizer.decode(list(engine.requests[0].prompt))
    assert prompt.endswith('<|im_start|>assistant\n{"name": ') or prompt.endswith('<|im_start|>assistant\n{"name":')
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(engine.requests[0].prompt)}
