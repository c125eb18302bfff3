"""The engine hears of tool calls in any dialect, streamed or not: the scripted model on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import Engine, EngineConfig, RequestHandle, load_pair
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over
from tests.support.scripted import save_scripted

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}


def chat(text: str) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": FUNCTION}]
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "tools": tools}


def responses(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": text, "tools": [{"type": "function", "strict": False, **FUNCTION}]}


def messages(text: str) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    return "/v1/messages", {"messages": [{"role": "user", "content": text}], "tools": tools, "max_tokens": 100}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = str(save_scripted(tmp_path_factory.mktemp("scripted")))
    with Engine(load_pair(model, model), EngineConfig()) as engine:
        yield engine


@pytest.fixture
def handles(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RequestHandle]:
    submit, seen = engine.submit, []
    monkeypatch.setattr(engine, "submit", lambda *args: seen.append(submit(*args)) or seen[-1])
    return seen


@pytest.mark.extended
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", [chat, responses, messages])
def test_a_call_is_told_and_a_text_is_not(
    engine: Engine, handles: list[RequestHandle], dialect: Any, streamed: bool
) -> None:
    client = TestClient(app_over(engine, Settings()), base_url="http://localhost")
    for script in ("call", "text", "think-call", "malformed"):
        path, body = dialect(f"script:{script}")
        answer = client.post(path, json={**body, "stream": streamed})
        assert answer.status_code == 200, answer.text
        assert ("get_weather" in answer.text) or script == "text"
    assert [handle.expecting for handle in handles] == [True, False, True, False]


def test_a_call_that_ends_the_answer_is_told(engine: Engine, handles: list[RequestHandle]) -> None:
    """Without parallel calls the server itself stops after the first."""
    client = TestClient(app_over(engine, Settings()), base_url="http://localhost")
    path, body = chat("script:two-calls")
    answer = client.post(path, json={**body, "parallel_tool_calls": False}).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert [handle.expecting for handle in handles] == [True]
