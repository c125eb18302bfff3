"""A real server: disconnects, silence, shutdown. A test client in the same process can show none of them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from mlx_specprefill import Progress, TokenEvent

from .conftest import events
from .fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


def running(base: str) -> tuple[int, int]:
    state = httpx.get(f"{base}/health").json()
    return state["running"], state["queued"]


def wait_for(condition: Any, within: float = 5.0) -> None:
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "timed out"
        time.sleep(0.01)


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
        assert whole.model_extra is not None
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


def test_the_first_event_precedes_all_work(live: Any, engine: FakeEngine) -> None:
    release = hang(engine)
    base, _ = live()
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert '"role":"assistant"' in next(lines)
        release.set()
        assert "data: [DONE]" in list(lines)


def test_silence_is_filled_while_queued_and_while_working(live: Any, engine: FakeEngine) -> None:
    release = hang(engine)
    base, _ = live(keep_alive_s=0.1)
    comments = 0
    with (
        httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}),
        httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as queued,
    ):
        lines = []
        for line in queued.iter_lines():
            lines.append(line)
            comments += line.startswith(": ")
            if comments == 3:
                release.set()
    assert comments >= 3
    assert events("\n".join(lines) + "\n")[-1] == "[DONE]"


def test_progress_that_nobody_asked_for_is_silence(live: Any, engine: FakeEngine) -> None:
    def script(request: Any) -> Any:
        for done in range(20):
            time.sleep(0.05)
            yield Progress("prefill", done, 20)
        yield from engine.tokens("end")

    engine.script = script
    base, _ = live(keep_alive_s=0.2)
    answer = httpx.post(base + CHAT, json={"messages": HI, "stream": True})
    assert answer.text.count(": keep-alive") >= 2


def test_a_stream_whose_client_leaves_is_stopped(live: Any, engine: FakeEngine) -> None:
    hang(engine, "a")
    base, _ = live()
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: running(base) == (1, 0))
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["cancelled"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_whole_answer_whose_client_leaves_is_stopped(live: Any, engine: FakeEngine, path: str) -> None:
    hang(engine)
    base, _ = live()

    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.post(base + path, json={"messages": HI, "prompt": "a"}), 0.5)

    asyncio.run(leave())
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["cancelled"]


def test_requests_in_the_queue_whose_clients_leave_are_not_run(live: Any, engine: FakeEngine) -> None:
    release = hang(engine, "a")
    base, _ = live()
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as first:
        lines = first.iter_lines()
        next(lines)
        for streamed in (True, False):
            with httpx.Client(timeout=0.3) as impatient, pytest.raises(httpx.ReadTimeout):
                impatient.post(base + CHAT, json={"messages": HI, "stream": streamed})
        wait_for(lambda: running(base) == (1, 2))
        release.set()
        assert list(lines)[-2] == "data: [DONE]"
    wait_for(lambda: running(base) == (0, 0))
    assert engine.reasons == ["stop", "cancelled", "cancelled"]


def test_a_client_that_leaves_in_the_middle_of_its_body(live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
    with httpx.Client() as client:
        assert client.post(base + CHAT, json={"messages": HI}).status_code == 200
    assert len(engine.requests) == 1


def test_a_dead_engine_ends_what_waits_for_it(live: Any, engine: FakeEngine) -> None:
    hang(engine)
    base, _ = live(keep_alive_s=0.1)
    engine.alive = False
    streamed = httpx.post(base + CHAT, json={"messages": HI, "stream": True})
    chunks = events(streamed.text)
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["engine_error"]["code"] == "engine_unavailable"
    assert chunks[-2]["specprefill"]["reason"] == "failed: the engine has stopped"
    whole = httpx.post(base + CHAT, json={"messages": HI})
    assert whole.status_code == 503


def test_shutdown_ends_streams_properly_and_refuses_new_requests(live: Any, engine: FakeEngine) -> None:
    hang(engine, "a")
    base, server = live()
    answers: list[httpx.Response] = []
    whole = threading.Thread(target=lambda: answers.append(httpx.post(base + CHAT, json={"messages": HI}, timeout=20)))
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        whole.start()
        wait_for(lambda: running(base) == (1, 1))
        server.should_exit = True
        rest = "\n".join([first, *lines])
    whole.join(10)
    chunks = events(rest + "\n")
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-2]["engine_error"]["code"] == "engine_unavailable"
    assert answers[0].status_code == 503
    assert answers[0].headers["retry-after"]
    wait_for(lambda: not engine.alive)


def test_shutdown_does_not_wait_for_a_long_step(live: Any, engine: FakeEngine) -> None:
    release = threading.Event()

    def script(request: Any) -> Any:
        release.wait(20)  # a step: no look at the cancel flag
        yield from engine.tokens("late")

    engine.script = script
    base, server = live(shutdown_grace_s=1)
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        wait_for(lambda: running(base) == (1, 0))
        server.should_exit = True
        chunks = events("\n".join([first, *lines]) + "\n")
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["engine_error"]["message"] == "the server is shutting down"
    assert not release.is_set()
    release.set()


def test_a_body_over_the_limit_is_refused_while_it_is_sent(live: Any, engine: FakeEngine) -> None:
    base, _ = live(body_limit=100_000)
    answer = httpx.post(base + CHAT, content=b"x" * 5_000_000)
    assert answer.status_code == 413
    chunked = httpx.post(base + CHAT, content=(b"x" * 50_000 for _ in range(50)))
    assert chunked.status_code == 413


def test_others_are_answered_while_the_engine_works(live: Any, engine: FakeEngine) -> None:
    hang(engine, "a")
    base, _ = live()
    with httpx.stream("POST", base + CHAT, json={"messages": HI, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert httpx.get(f"{base}/v1/models").status_code == 200
        assert httpx.post(base + CHAT, json={"messages": []}).status_code == 400
        assert running(base) == (1, 0)


def test_events_that_come_after_the_end_are_dropped(live: Any, engine: FakeEngine) -> None:
    base, _ = live()
    engine.script = lambda request: [*engine.tokens("aXb"), TokenEvent(3), *engine.tokens("c" * 500)]
    assert httpx.post(base + CHAT, json={"messages": HI, "stop": "X"}).json()["choices"][0]["message"]["content"] == "a"
    assert httpx.get(f"{base}/health").status_code == 200
