"""Whatever is posted: never a 5xx, always JSON or a proper stream, and the engine lives on."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .bodies import CHAT, COMPLETION, JSON
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


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=CHAT)
def test_chat(lasting: Any, body: dict[str, Any]) -> None:
    check(lasting, "/v1/chat/completions", orjson.dumps(body))


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=COMPLETION)
def test_completions(lasting: Any, body: dict[str, Any]) -> None:
    check(lasting, "/v1/completions", orjson.dumps(body))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=40) | JSON.map(orjson.dumps), path=st.sampled_from(["chat/completions", "completions"]))
def test_any_bytes(lasting: Any, body: bytes, path: str) -> None:
    check(lasting, f"/v1/{path}", body)
