"""POST /v1/responses: bodies in, wire bytes out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from mlx_specprefill import ContextLengthError, EngineClosedError, Failed, InvalidRequestError, Progress, TokenEvent
from mlx_specprefill_server.deltas import AnswerDelta, CallBroken, Idle, TextDelta
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.openai.responses import ResponsesAnswer
from mlx_specprefill_server.openai.responses_protocol import ResponsesRequest
from mlx_specprefill_server.settings.server import Settings

from .canned_answers import EVERYTHING, REPORT, TEXT, THOUGHT, Given, call, done, named_events, streamed
from .conftest import client_of
from .fakes import FakeEngine, byte_tokenizer
from .templates import QWEN_3

URL = "/v1/responses"
EVENTS: Any = TypeAdapter(ResponseStreamEvent)


def ask(client: TestClient, **fields: Any) -> Any:
    answer = client.post(URL, json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post(URL, json={"input": "Hi", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return checked(named_events(answer.text))


def refusal(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post(URL, json={"input": "Hi", **fields})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


def answer_of(engine: FakeEngine, pieces: list[AnswerDelta], **fields: Any) -> ResponsesAnswer:
    body = ResponsesRequest(**({"input": "Hi"} | fields))
    return ResponsesAnswer(Service(engine, Settings()), body, Given(pieces))


def checked(payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every event is what the SDK's type says, in the order that clients rely on; the items are those of the end."""
    assert [payload["sequence_number"] for payload in payloads] == list(range(len(payloads)))
    for payload in payloads:
        EVENTS.validate_python(payload, strict=True)
    assert [payload["type"] for payload in payloads[:2]] == ["response.created", "response.in_progress"]
    assert len({payload["response"]["id"] for payload in payloads if "response" in payload}) == 1
    items = replayed(payloads[2:-1])
    assert payloads[-1]["response"]["output"] == items
    return payloads


def replayed(payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output items, put together from the deltas alone."""
    items: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    text, part = "", None
    for payload in payloads:
        kind = payload["type"].removeprefix("response.")
        if kind == "in_progress":
            continue
        assert payload["output_index"] == len(items)
        if kind == "output_item.added":
            assert item is None
            item, text, part = dict(payload["item"]), "", None
            assert item["status"] == "in_progress"
            continue
        assert payload.get("item_id", item["id"]) == item["id"]
        assert payload.get("content_index", 0) == 0
        if kind == "content_part.added":
            part = payload["part"]
        elif kind.endswith(".delta"):
            text += payload["delta"]
        elif kind == "content_part.done":
            assert part is not None
            assert payload["part"]["text"] == text
            item["content"] = [payload["part"]]
        elif kind == "output_item.done":
            status = payload["item"]["status"]
            assert payload["item"] == item | {"status": status}
            items.append(payload["item"])
            item = None
        else:
            assert kind.endswith(".done")
            (member,) = payload.keys() & {"arguments", "input", "text"}
            assert payload[member] == text
            if member != "text":
                item[member] = text
    assert item is None
    return items


def prompt(engine: FakeEngine) -> str:
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def test_a_whole_response(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, metadata={"a": "b"}, max_output_tokens=50, temperature=0.5)
    Response.model_validate(body, strict=True)
    n = len(engine.requests[0].prompt)
    assert body["id"].startswith("resp_")
    assert body["status"] == "completed"
    (item,) = body["output"]
    assert item["id"].startswith("msg_")
    assert item == {
        "id": item["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
    }
    assert body["usage"] == {
        "input_tokens": n,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n + 6,
    }
    echoed = {
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "temperature": 0.5,
        "store": False,
        "model": "demo/target",
    }
    assert body.items() >= echoed.items()
    assert body["specprefill"]["mode"] == "full"
    assert body["timings"]["predicted_n"] == 6


def test_a_streamed_response(client: TestClient) -> None:
    payloads = stream(client)
    kinds = [payload["type"] for payload in payloads]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    end = payloads[-1]["response"]
    assert end["specprefill"]["mode"] == "full"
    assert end["timings"]["predicted_n"] == 6
    assert end["usage"]["output_tokens"] == 6
    assert "".join(p["delta"] for p in payloads if "delta" in p) == "Hello"


def test_every_kind_of_item(engine: FakeEngine) -> None:
    body = asyncio.run(answer_of(engine, EVERYTHING).collect())
    Response.model_validate(body, strict=True)
    reasoning, message, read, other = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "Good day"
    assert (read["call_id"], read["name"], read["arguments"]) == ("call_0", "read", '{"path": "a.txt"}')
    assert (other["call_id"], other["name"], other["arguments"]) == ("call_1", "list", "{}")
    assert len({item["id"] for item in body["output"]}) == 4
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert body["specprefill"] == REPORT.to_dict()


def test_a_stream_says_what_a_whole_response_says(engine: FakeEngine) -> None:
    payloads = checked(streamed(answer_of(engine, EVERYTHING).stream()))
    whole = asyncio.run(answer_of(engine, EVERYTHING).collect())
    end = payloads[-1]["response"]
    without = {"id", "created_at", "completed_at", "output"}
    assert {k: v for k, v in end.items() if k not in without} == {k: v for k, v in whole.items() if k not in without}
    for one, other in zip(end["output"], whole["output"], strict=True):
        assert one | {"id": ""} == other | {"id": ""}


def test_text_and_thought_may_alternate(engine: FakeEngine) -> None:
    pieces = [*THOUGHT, *TEXT, *THOUGHT, *call(0, "a", "{}"), *TEXT, done()]
    payloads = checked(streamed(answer_of(engine, pieces).stream()))
    kinds = [item["type"] for item in payloads[-1]["response"]["output"]]
    assert kinds == ["reasoning", "message", "reasoning", "function_call", "message"]


def test_tokens_without_text_make_no_message(engine: FakeEngine) -> None:
    tag = TextDelta("", (TokenEvent(65, -0.5),))
    pieces = [tag, *call(0, "a", "{}"), tag, *call(1, "a", "{}"), *TEXT, tag, done("tool_calls")]
    payloads = checked(streamed(answer_of(engine, pieces, top_logprobs=1).stream()))
    output = payloads[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call", "message"]
    assert [entry["token"] for entry in output[-1]["content"][0]["logprobs"]] == [engine.pair.tokenizer.decode([65])]


def test_nothing_said_is_a_response_without_items(engine: FakeEngine) -> None:
    assert checked(streamed(answer_of(engine, [done()]).stream()))[-1]["response"]["output"] == []


def test_an_answer_that_was_cut_short(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, max_output_tokens=2)
    Response.model_validate(body, strict=True)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"
    last = stream(client, max_output_tokens=2)[-1]
    assert last["type"] == "response.incomplete"
    pieces = [*call(0, "read", '{"path": "a')[:-1], done("length")]
    last = checked(streamed(answer_of(engine, pieces).stream()))[-1]
    assert last["response"]["output"][0]["arguments"] == '{"path": "a'
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_a_call_that_breaks_stays_incomplete(engine: FakeEngine) -> None:
    pieces = [*call(0, "read", '{"path": "a')[:-1], CallBroken(), *TEXT, done()]
    payloads = streamed(answer_of(engine, pieces).stream())
    items = [payload["item"] for payload in payloads if payload["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
    assert payloads[-1]["response"]["output"] == items


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("boom"), "invalid_prompt"),
        (Failed(InvalidRequestError("boom")), "invalid_prompt"),
        (Failed(EngineClosedError("boom")), "server_error"),
        (Failed(ContextLengthError(5, 1, 5)), "context_length_exceeded"),
    ],
)
def test_a_failure_in_a_stream(client: TestClient, engine: FakeEngine, error: Any, code: str) -> None:
    engine.script = lambda request: [*engine.tokens("He", end=False), error]
    answer = client.post(URL, json={"input": "Hi", "stream": True})
    payloads = named_events(answer.text)
    last = payloads[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == code
    assert last["response"]["output"][0]["content"][0]["text"] == "He"
    assert last["response"]["specprefill"]["reason"].startswith("failed: ")
    if code != "context_length_exceeded":  # which agents know, but the SDK's type does not
        checked(payloads)
        assert "boom" in last["response"]["error"]["message"]


def test_a_failure_of_a_whole_response_has_a_status(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [RuntimeError("boom")]
    answer = client.post(URL, json={"input": "Hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
    engine.full = True
    assert client.post(URL, json={"input": "Hi"}).status_code == 503


def test_silence_is_filled_with_events(engine: FakeEngine) -> None:
    given = [Progress("prefill", 1, 2), Idle(), Idle(), *TEXT, Idle(), done()]
    payloads = checked(streamed(answer_of(engine, given).stream()))
    assert [payload["type"] for payload in payloads].count("response.in_progress") == 4
    assert not any("prompt_progress" in payload for payload in payloads)


def test_progress_rides_on_events(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda request: [Progress("queued", 0, 4), Progress("prefill", 3, 4, 0), *engine.tokens("a")]
    payloads = stream(client, return_progress=True)
    (progress,) = [payload["prompt_progress"] for payload in payloads if "prompt_progress" in payload]
    assert progress.items() >= {"total": 4, "processed": 3, "stage": "prefill"}.items()


def test_logprobs(client: TestClient) -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    body = ask(client, include=include, top_logprobs=2)
    Response.model_validate(body, strict=True)
    logprobs = body["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == list("Hello")
    assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * 5
    payloads = stream(client, top_logprobs=1)
    in_deltas = [entry for payload in payloads if "delta" in payload for entry in payload["logprobs"]]
    assert in_deltas == payloads[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert len(in_deltas) == 5


@pytest.mark.parametrize("content", ["gAAAAAB", "text:%", "text:/w==", None])
def test_reasoning_that_another_server_has_sealed_is_left_out(client: TestClient, content: str | None) -> None:
    reasoning: Any = {"type": "reasoning", "summary": [], "encrypted_content": content}
    assert ask(client, input=[{"role": "user", "content": "Hi"}, reasoning])["status"] == "completed"


def test_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    ask(
        client,
        instructions="You are terse.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"role": "user", "content": "Read it."},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "Reading.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}', "namespace": "fs"},
            {"type": "function_call", "call_id": "c2", "name": "read", "arguments": '{"path": "b"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "A"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "B"}, {"type": "input_image", "image_url": "data:image/png;base64,x"}]},
            {"type": "web_search_call", "id": "ws", "status": "completed"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "Go on."},
        ],
    )  # fmt: skip
    assert prompt(engine) == (
        "<|im_start|>system\nYou are terse.\n\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nRead it.<|im_end|>\n"
        "<|im_start|>assistant\nReading.<|im_end|>\n"
        '<|im_start|>user\n{"name": "read", "arguments": {"path": "a"}}\n'
        '{"name": "read", "arguments": {"path": "b"}}<|im_end|>\n'
        "<|im_start|>tool\nA<|im_end|>\n"
        "<|im_start|>tool\nB\n[image left out: this model reads text only]<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n"
        "<|im_start|>user\nGo on.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    body = ask(
        client, temperature=0.5, top_p=0.9, top_k=7, seed=3, max_output_tokens=32000, specprefill=True,
        specprefill_keep_pct=0.5, specprefill_return_spans=True, store=True, truncation="auto", service_tier="auto",
        prompt_cache_key="k", client_metadata={"a": 1}, reasoning={"summary": "auto"}, text={"verbosity": "low"},
        tools=None, tool_choice="auto", parallel_tool_calls=True, unknown=[1], user="u",
    )  # fmt: skip
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert request.max_tokens == engine.pair.context_length - len(request.prompt)
    assert body["specprefill"]["mode"] == "sparse"
    assert body["specprefill"]["kept_spans"] == [[0, len(request.prompt) // 2]]
    assert (body["store"], body["prompt_cache_key"], body["user"]) == (False, "k", "u")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
            "text.format.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ],
)
def test_a_format_constrains_the_answer(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    assert ask(client, **fields)["text"] == fields.get("text", {"format": {"type": "text"}})
    constraint = engine.requests[0].constraint
    assert constraint.field == field


def test_tools_are_echoed_as_they_are_understood(client: TestClient) -> None:
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True, "description": "d"},
        {"type": "namespace", "name": "agents", "description": "x", "tools": [
            {"type": "function", "name": "spawn", "parameters": None, "strict": None}, {"type": "custom", "name": "x"},
            {"type": "function", "name": "read"},
        ]},
        {"type": "custom", "name": "patch"},
    ]  # fmt: skip
    body = ask(client, tools=tools)
    Response.model_validate(body, strict=True)
    read, patch, spawn, inner, second = body["tools"]
    assert [(tool["type"], tool["name"]) for tool in (patch, inner)] == [("custom", "patch"), ("custom", "x")]
    assert (read["name"], read["strict"], read["description"]) == ("read", True, "d")
    assert second["name"] == "agents__read"
    assert (spawn["name"], spawn["strict"], spawn["parameters"]) == ("spawn", False, {"type": "object"})


def test_calls_of_functions_from_a_namespace_name_it(engine: FakeEngine) -> None:
    tools = [{"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}]
    pieces = [*call(0, "spawn", "{}"), *call(1, "other", "{}"), done("tool_calls")]
    payloads = checked(streamed(answer_of(engine, pieces, tools=tools).stream()))
    ends = [event["name"] for event in payloads if event["type"] == "response.function_call_arguments.done"]
    assert ends == ["spawn", "other"]
    spawn, other = payloads[-1]["response"]["output"]
    assert spawn["namespace"] == "agents"
    assert "namespace" not in other


def test_counting(client: TestClient, engine: FakeEngine) -> None:
    fields = {"input": "Hi", "instructions": "Be brief.", "tools": [{"type": "function", "name": "read"}]}
    body = client.post(f"{URL}/input_tokens", json=fields).json()
    InputTokenCountResponse.model_validate(body, strict=True)
    ask(client, **fields)
    assert body == {"object": "response.input_tokens", "input_tokens": len(engine.requests[0].prompt)}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 1}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0].input"),
        (said("Hi"), "input[0].content[0]"),
        (said({"type": "input_text"}), "input[0].content[0].text"),
        (said({"type": "hologram"}), "input[0].content[0].type"),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": [{"type": []}]}]},
            "input[0].output[0].type",
        ),
        ({"instructions": ["a"]}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [1]}]}, "tools[0].tools[0]"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "grammar": "start: /a/"}, "grammar"),
        ({"metadata": []}, "metadata"),
    ],
)
def test_bad_input(client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str) -> None:
    error = refusal(client, **fields)
    assert error["param"] == param
    assert error["message"]
    assert not engine.requests


def test_nothing_is_kept(client: TestClient) -> None:
    body = ask(client, store=True)
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
        assert client.request(method, f"{URL}/{body['id']}{path}").status_code == 404


def test_some_of_the_tools_can_be_allowed(engine: FakeEngine) -> None:
    engine.pair.tokenizer = byte_tokenizer(QWEN_3)
    client = client_of(engine)
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]}
    body = ask(client, tools=tools, tool_choice=choice)
    Response.model_validate(body, strict=True)
    ask(client, tools=tools[:1])
    assert engine.requests[0].prompt.tolist() == engine.requests[1].prompt.tolist()
    answer = client.post("/v1/responses", json={"input": "Hi", "tools": tools[1:], "tool_choice": choice})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tool_choice: no tool is called 'f'"
