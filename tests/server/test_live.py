"""A real server: disconnects, silence, shutdown. A test client in the same process can show none of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from mlx_specprefill import TokenEvent
from mlx_specprefill_server import request_body
from mlx_specprefill_server.generation import generation
from mlx_specprefill_server.models import server_state

from .conftest import events
from .fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]
Endpoint = tuple[str, dict[str, Any]]


def running(base: str) -> tuple[int, int]:
    state = httpx.get(f"{base}/health", timeout=60).json()
    return state["running"], state["queued"]


def wait_for(condition: Any, within: float = 60.0) -> None:
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.01)


def leave(base: str, endpoint: Endpoint, streamed: bool, when: Callable[[], bool]) -> None:
    """Sends a request and hangs up as soon as `when` is true."""

    async def impatient() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            call = asyncio.create_task(client.post(base + endpoint[0], json=endpoint[1] | {"stream": streamed}))
            while not when():
                assert not call.done()
                await asyncio.sleep(0.01)
            call.cancel()

    asyncio.run(impatient())


def hang(engine: FakeEngine, first: str = "") -> threading.Event:
    """Answers with `first` and then waits until released."""
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens(first, end=False), release, *engine.tokens("end")]
    return release


def test_the_sdk(live: Any, engine: FakeEngine) -> None:
    base, _ = live(api_keys=("k",))
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        whole = client.chat.completions.create(model="m", messages=HI, extra_body={"specprefill": True})
        assert whole.choices[0].message.content == "Hello"
        assert whole.model_extra["specprefill"]["mode"] == "sparse"
        stream = client.chat.completions.create(
            model="m", messages=HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
        assert chunks[-1].usage is not None
        assert [model.id for model in client.models.list()] == ["demo/target"]
        assert client.completions.create(model="m", prompt="ab").choices[0].text == "Hello"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=HI, extra_body={"specprefill_keep_pct": 3})
        assert caught.value.param == "specprefill_keep_pct"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_a_client_that_leaves_in_the_middle_of_its_body(base: str, engine: FakeEngine) -> None:
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
    with httpx.Client(timeout=60) as client:
        assert client.post(base + CHAT, json={"messages": HI}).status_code == 200
    assert len(engine.requests) == 1


def test_a_dead_engine_ends_what_waits_for_it(live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "KEEP_ALIVE_S", 0.1)
    hang(engine)
    base, _ = live()
    engine.alive = False
    streamed = httpx.post(base + CHAT, json={"messages": HI, "stream": True}, timeout=60)
    chunks = events(streamed.text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["engine_error"]["code"] == "engine_unavailable"
    assert chunks[-2]["specprefill"]["reason"] == "failed: the engine has stopped"
    whole = httpx.post(base + CHAT, json={"messages": HI}, timeout=60)
    assert whole.status_code == 503


def test_shutdown_ends_streams_properly_and_refuses_new_requests(live: Any, engine: FakeEngine) -> None:
    hang(engine, "a")
    base, server = live()
    answers: list[httpx.Response] = []
    whole = threading.Thread(target=lambda: answers.append(httpx.post(base + CHAT, json={"messages": HI}, timeout=60)))
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        whole.start()
        wait_for(lambda: running(base) == (1, 1))
        server.should_exit = True
        rest = "\n".join([first, *lines])
    whole.join(60)
    chunks = events(rest + "\n")
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["engine_error"]["code"] == "engine_unavailable"
    assert answers[0].status_code == 503
    assert answers[0].headers["retry-after"]
    wait_for(lambda: not engine.alive)


def test_shutdown_does_not_wait_for_a_long_step(live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_state, "PATIENCE_S", 0.5)
    release = threading.Event()

    def script(request: Any) -> Any:
        release.wait(60)  # a step: no look at the cancel flag
        yield from engine.tokens("late")

    engine.script = script
    base, server = live()
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        wait_for(lambda: running(base) == (1, 0))
        server.should_exit = True
        chunks = events("\n".join([first, *lines]) + "\n")
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["engine_error"]["message"] == "the server is shutting down"
    assert not release.is_set()
    release.set()


def test_a_body_over_the_limit_is_refused_while_it_is_sent(
    live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "BODY_LIMIT", 100_000)
    base, _ = live()
    answer = httpx.post(base + CHAT, content=b"x" * 5_000_000, timeout=60)
    assert answer.status_code == 413
    chunked = httpx.post(base + CHAT, content=(b"x" * 50_000 for _ in range(50)), timeout=60)
    assert chunked.status_code == 413


def test_others_are_answered_while_the_engine_works(base: str, engine: FakeEngine) -> None:
    hang(engine, "a")
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.get(f"{base}/v1/models", timeout=60).status_code == 200
        assert httpx.post(base + CHAT, json={"messages": []}, timeout=60).status_code == 400
        wait_for(lambda: running(base) == (1, 0))


def test_events_that_come_after_the_end_are_dropped(base: str, engine: FakeEngine) -> None:
    engine.script = lambda request: [*engine.tokens("aXb"), TokenEvent(3), *engine.tokens("c" * 500)]
    answer = httpx.post(base + CHAT, json={"messages": HI, "stop": "X"}, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "a"
    assert httpx.get(f"{base}/health", timeout=60).status_code == 200
