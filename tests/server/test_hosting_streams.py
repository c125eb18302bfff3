"""Streams of models that are not in memory yet, on a real server: signs of life, then the answer or the failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_specprefill_server.models import loading_stream
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.settings.server import Settings
from tests.support.waiting import eventually

from .hosting import FakeHost, entry, models_of, running
from .hosting import host as host

HI: Any = [{"role": "user", "content": "Hi"}]
STREAMED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
}
ALL = pytest.mark.parametrize("path", STREAMED)


@pytest.fixture
def live(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Models]]:
    monkeypatch.setattr(loading_stream, "PROGRESS_S", 0.02)
    settings = Settings(port=0)
    models = models_of(host, entry("a"), entry("b"), max_models=1)
    with running(host, models, settings) as address:
        yield address, models


def streaming(base: str, path: str, **more: Any) -> Any:
    headers = more.pop("headers", {})
    body = STREAMED[path] | {"stream": True, "model": "a"} | more
    return httpx.stream("POST", base + path, json=body, headers=headers, timeout=60)


def whole(base: str, path: str, **more: Any) -> str:
    with streaming(base, path, **more) as reply:
        assert reply.status_code == 200
        text: str = reply.read().decode()
        return text


@ALL
def test_it_shows_that_it_lives_and_then_answers(live: Any, host: FakeHost, path: str) -> None:
    base, _ = live
    host.held_up.clear()
    seen: list[str] = []
    with streaming(base, path) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        while sum('"step":"Loading"' in line for line in seen) < 3:
            seen.append(next(lines))
        host.held_up.set()
        rest = list(lines)
    told = next(line for line in seen if '"Loading"' in line)
    assert '"done":1,"total":2' in told
    if path == "/v1/messages":
        assert json.loads(told.removeprefix("data: "))["type"] == "ping"
    else:
        assert told.startswith(": loading ")
    direct = whole(base, path).splitlines()
    assert not any("loading" in line for line in direct)
    assert [kind(line) for line in (*seen, *rest) if kind(line)] == [kind(line) for line in direct if kind(line)]
    assert text_of(path, "\n".join(rest)) == text_of(path, "\n".join(direct)) == "I am a"
    assert host.loaded == ["a"]


def kind(line: str) -> str | None:
    """Return the type or the fields of an event with data, None for a sign of life."""
    if not line.startswith("data: ") or '"loading"' in line:
        return None
    event = {} if line == "data: [DONE]" else json.loads(line[6:])
    return event.get("type") or " ".join(event)


def text_of(path: str, text: str) -> str:
    found = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if path == "/v1/messages":
            found.append(event.get("delta", {}).get("text", ""))
        elif path == "/v1/responses":
            found.append(event["delta"] if event["type"] == "response.output_text.delta" else "")
        else:
            choice = (event["choices"] or [{}])[0]
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(found)


def slowly(host: FakeHost) -> None:
    """The next loading lasts for some signs of life."""
    host.held_up.clear()
    threading.Thread(target=lambda: (host.loading.wait(30), time.sleep(0.2), host.held_up.set()), daemon=True).start()


@pytest.mark.extended
def test_the_sdks_know_nothing_of_it(live: Any, host: FakeHost) -> None:
    base, models = live
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        slowly(host)
        chunks = client.chat.completions.create(model="a", messages=HI, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I am a"
        slowly(host)
        with client.responses.stream(model="b", input="Hi") as stream:
            assert stream.get_final_response().output_text == "I am b"
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as claude:
        slowly(host)
        with claude.messages.stream(model="a", max_tokens=50, messages=HI) as stream:
            assert stream.get_final_text() == "I am a"
    assert host.loaded == ["a", "b", "a"]
    assert eventually(lambda: [one.users for one in models] == [0, 0])  # clients may read the end before the server


@ALL
def test_a_failed_loading_is_told_in_the_stream(live: Any, host: FakeHost, path: str) -> None:
    base, _ = live
    host.broken["a"] = "its weights are cut off"
    text = whole(base, path)
    assert "its weights are cut off" in text
    again = httpx.post(base + path, json=STREAMED[path] | {"stream": True, "model": "a"})
    assert again.status_code == 500  # known from now on
    assert "its weights are cut off" in again.text
    data = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/responses":
        assert data[-1]["type"] == "response.failed"
        assert data[-1]["response"]["error"]["code"] == "invalid_prompt"
    else:
        assert data[-1]["error"]["message"]
        assert (data[-1].get("type") == "error") == (path == "/v1/messages")


def test_the_sdks_raise_what_fails_in_it(live: Any, host: FakeHost) -> None:
    base, models = live
    host.broken["a"] = "its weights are cut off"
    with (
        openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client,
        pytest.raises(openai.APIError, match="cut off"),
    ):
        list(client.chat.completions.create(model="a", messages=HI, stream=True))
    models.get("a").state = "unloaded"
    with (
        anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as claude,
        pytest.raises(anthropic.APIStatusError, match="cut off"),
        claude.messages.stream(model="a", max_tokens=50, messages=HI) as stream,
    ):
        stream.get_final_text()


@ALL
def test_what_the_model_refuses_is_told_in_the_stream(live: Any, host: FakeHost, path: str) -> None:
    base, models = live
    field = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    long = "x" * 5000
    more = {field: long} if field else {"messages": [{"role": "user", "content": long}]}
    text = whole(base, path, **more)
    assert "context length" in text or "too long" in text
    assert eventually(lambda: models.get("a").users == 0)


def test_a_client_that_leaves_ends_the_waiting_not_the_loading(live: Any, host: FakeHost) -> None:
    base, models = live
    host.held_up.clear()
    with streaming(base, "/v1/chat/completions") as reply:
        next(reply.iter_lines())
    assert eventually(lambda: models.get("a").users == 0)
    host.held_up.set()
    assert eventually(lambda: models.get("a").state == "loaded")
    assert host.engines["a"].requests == []


def test_the_time_of_a_request_counts_while_it_waits(live: Any, host: FakeHost) -> None:
    base, _ = live
    host.held_up.clear()
    text = whole(base, "/v1/chat/completions", headers={"x-request-timeout": "0.3"})
    assert "request_timeout" in text
    reply = httpx.post(
        f"{base}/v1/completions", json={"prompt": "Hi", "model": "a"}, headers={"x-request-timeout": "0.3"}, timeout=60
    )
    assert reply.status_code == 504
    host.held_up.set()


def test_a_stop_ends_the_waiting(live: Any, host: FakeHost) -> None:
    base, models = live
    host.held_up.clear()
    with streaming(base, "/v1/chat/completions") as reply:
        lines = reply.iter_lines()
        next(lines)
        models.state.stopping = True
        host.held_up.set()
        rest = "\n".join(lines)
    assert "shutting down" in rest
    models.state.stopping = False
