"""Whatever is posted: never a 5xx, always JSON or a proper stream, and the engine lives on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

from .body_strategies import CHAT, COMPLETION, JSON, TEXTS
from .conftest import client_of, events
from .fakes import FakeEngine


@pytest.fixture(scope="module")
def lasting() -> Any:
    engine = FakeEngine()
    yield engine, client_of(engine)
    engine.close()


def check(lasting: Any, path: str, body: bytes) -> None:
    engine, client = lasting
    answer = client.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        error = orjson.loads(answer.content)["error"]
        assert error["message"]
        assert error["type"] == "invalid_request_error"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert events(answer.text)[-1] == "[DONE]"
        assert "specprefill" in events(answer.text)[-2]
        assert "engine_error" not in events(answer.text)[-2]
    else:
        assert "specprefill" in orjson.loads(answer.content)
    assert engine.idle()


@pytest.mark.extended
@settings(max_examples=examples(300), suppress_health_check=list(HealthCheck))
@given(body=CHAT)
def test_chat(lasting: Any, body: dict[str, Any]) -> None:
    check(lasting, "/v1/chat/completions", orjson.dumps(body))


@pytest.mark.extended
@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(body=COMPLETION)
def test_completions(lasting: Any, body: dict[str, Any]) -> None:
    check(lasting, "/v1/completions", orjson.dumps(body))


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=40) | JSON.map(orjson.dumps), path=st.sampled_from(["chat/completions", "completions"]))
def test_any_bytes(lasting: Any, body: bytes, path: str) -> None:
    check(lasting, f"/v1/{path}", body)


@pytest.mark.extended
@settings(max_examples=examples(200), suppress_health_check=list(HealthCheck))
@given(body=TEXTS, path=st.sampled_from(["/tokenize", "/detokenize", "/apply-template"]))
def test_texts_and_tokens(lasting: Any, body: dict[str, Any], path: str) -> None:
    answer = lasting[1].post(path, content=orjson.dumps(body))
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert orjson.loads(answer.content)["error"]["message"]
    else:
        assert orjson.loads(answer.content).keys() & {"tokens", "content", "prompt"}


NASTY = {
    "nothing": b"",
    "no JSON": b"model=x",
    "not UTF-8": b'{"model": "\xff"}',
    "half a pair": rb'{"model": "\ud800"}',
    "half a pair within": rb'{"messages": [{"role": "a\udc00b"}], "tokens": ["\udfff"]}',
    "NaN": b'{"temperature": NaN}',
    "huge number": b'{"max_tokens": 1e999}',
    "long number": b'{"max_tokens": %s}' % (b"9" * 5000),
    "an array": b"[]",
    "a string": b'"x"',
    "deep": b'{"messages": ' + b"[" * 100_000,
    "deep and closed": b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    "deeper and closed": b'{"messages": ' + b'[{"a":' * 5000 + b"1" + b"}]" * 5000 + b"}",
    "a key twice": b'{"messages": 1, "messages": 2}',
    "NUL": rb'{"messages": [{"role": "\u0000"}], "tokens": ["\u0000"]}',
}


@pytest.mark.parametrize("body", NASTY.values(), ids=list(NASTY))
def test_every_endpoint_takes_a_beating(lasting: Any, body: bytes) -> None:
    engine, client = lasting
    document = client.get("/openapi.json").json()["paths"]
    paths = [path for path, methods in document.items() if "requestBody" in methods.get("post", {})]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(paths)
    for path in paths:
        answer = client.post(path, content=body)
        assert answer.status_code == 400, (path, answer.text)
        assert orjson.loads(answer.content)["error"]["message"], path
    assert engine.idle()
