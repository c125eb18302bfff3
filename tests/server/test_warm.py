"""POST /v1/specprefill/warm: the beginning of an agent's sessions, from a request of any dialect."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

from mlx_specprefill_server.cli.agents import body_of

from .fakes import FakeEngine

SYSTEM = "You are an agent of the harbour. Answer with calls."
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
FUNCTION = {"name": "read", "description": "Reads a file", "parameters": PARAMETERS}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "only a system message": {
        "messages": [{"role": "system", "content": SYSTEM}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "responses": {"instructions": SYSTEM, "input": "Hello", "tools": [{"type": "function", **FUNCTION}]},
    "messages": {
        "system": SYSTEM,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"name": "read", "description": "Reads a file", "input_schema": PARAMETERS}],
    },
}


@pytest.mark.parametrize("name", BODIES)
def test_the_engine_is_to_remember_the_opening_and_one_token_more(
    engine: FakeEngine, client: TestClient, name: str
) -> None:
    answer = client.post("/v1/specprefill/warm", json=BODIES[name])
    assert answer.status_code == 200, answer.text
    (request,) = engine.requests
    assert (request.pin_system_prefix, request.max_tokens, request.specprefill.enabled) == (True, 1, False)
    assert len(request.prompt) == request.system_prefix_len + 1
    text = engine.pair.tokenizer.decode(request.prompt[: request.system_prefix_len].tolist())
    assert SYSTEM in text
    assert "Hello" not in text
    assert all(span.kind in ("system", "tools") for span in request.spans)
    assert answer.json()["tokens"] == request.system_prefix_len
    assert answer.json()["object"] == "specprefill.warm"


def test_every_dialect_warms_the_same_prompt(engine: FakeEngine, client: TestClient) -> None:
    for body in BODIES.values():
        client.post("/v1/specprefill/warm", json=body)
    openings = {tuple(request.prompt[: request.system_prefix_len].tolist()) for request in engine.requests}
    assert len(openings) == 1


def test_a_prompt_without_a_beginning_of_its_own_is_refused(engine: FakeEngine, client: TestClient) -> None:
    answer = client.post("/v1/specprefill/warm", json={"messages": [{"role": "user", "content": "Hello"}]})
    assert answer.status_code == 400
    assert "neither with a system message nor with tools" in answer.text
    assert engine.requests == []


def test_a_salt_keeps_it_apart(engine: FakeEngine, client: TestClient) -> None:
    client.post("/v1/specprefill/warm", json={**BODIES["chat"], "cache_salt": "mine"})
    assert engine.requests[0].label.salt


def test_a_file_is_a_request_or_a_system_prompt() -> None:
    assert body_of('{"messages": []}') == {"messages": []}
    for text in (SYSTEM, "[1]", '"{}"'):
        assert body_of(text) == {"messages": [{"role": "system", "content": text}]}
