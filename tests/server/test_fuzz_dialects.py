"""Whatever is posted to the Responses and Messages dialects: never a 5xx, a proper end, and the engine lives on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from anthropic.types import ErrorResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

from .body_strategies import JSON, MESSAGES, RESPONSES
from .canned_answers import named_events
from .test_fuzz import lasting as lasting

pytestmark = pytest.mark.extended

ENDS = {"/v1/responses": ("response.completed", "response.incomplete"), "/v1/messages": ("message_stop",)}
COUNTERS = ("/v1/responses/input_tokens", "/v1/messages/count_tokens")


def check(lasting: Any, path: str, body: bytes) -> None:
    engine, client = lasting
    answer = client.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        refused(path, orjson.loads(answer.content))
    elif answer.headers["content-type"].startswith("text/event-stream"):
        payloads = named_events(answer.text)
        assert payloads[-1]["type"] in ENDS[path]
        assert "specprefill" in (payloads[-2] if path == "/v1/messages" else payloads[-1]["response"])
    elif path in COUNTERS:
        assert orjson.loads(answer.content)["input_tokens"] > 0
    else:
        assert "specprefill" in orjson.loads(answer.content)
    assert engine.idle()


def refused(path: str, body: dict[str, Any]) -> None:
    if path.startswith("/v1/messages"):
        ErrorResponse.model_validate(body, strict=True)
    assert body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(body=RESPONSES, count=st.booleans())
def test_responses(lasting: Any, body: dict[str, Any], count: bool) -> None:
    check(lasting, COUNTERS[0] if count else "/v1/responses", orjson.dumps(body))


@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(body=MESSAGES, count=st.booleans())
def test_messages(lasting: Any, body: dict[str, Any], count: bool) -> None:
    check(lasting, COUNTERS[1] if count else "/v1/messages", orjson.dumps(body))


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=40) | JSON.map(orjson.dumps), path=st.sampled_from([*ENDS, *COUNTERS]))
def test_any_bytes(lasting: Any, body: bytes, path: str) -> None:
    check(lasting, path, body)


DEEP = [f'{{"a": {inner}}}' for inner in ("{}", '{"a":' * 240 + "1" + "}" * 240, '{"a":' * 800 + "1" + "}" * 800)]


@pytest.mark.parametrize("path", [*ENDS, *COUNTERS])
@pytest.mark.parametrize("deep", DEEP, ids=["flat", "deep", "deepest"])
def test_deep_nesting(lasting: Any, path: str, deep: str) -> None:
    tool = f'{{"type": "function", "name": "f", "parameters": {deep}}}'
    if path.startswith("/v1/messages"):
        tool = f'{{"name": "f", "input_schema": {deep}}}'
    for stream in ("true", "false"):
        head = f'"input": "Hi", "messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 5, "stream": {stream}'
        check(lasting, path, f'{{{head}, "tools": [{tool}]}}'.encode())
        check(lasting, path, f'{{{head}, "metadata": {deep}, "text": {deep}, "system": [{deep}]}}'.encode())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_results_inside_of_results(lasting: Any, path: str) -> None:
    block = '{"type": "search_result", "content": ['
    for depth in (3, 330):
        content = block * depth + '{"type": "text", "text": "x"}' + "]}" * depth
        message = f'{{"role": "user", "content": [{content}]}}'
        check(lasting, path, f'{{"max_tokens": 5, "messages": [{message}]}}'.encode())
