"""Limits on the time and number of requests, and their end when the server stops."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.generation import generation
from mlx_specprefill_server.http.sockets import bound_sockets
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.running import process
from mlx_specprefill_server.running.process import Server
from mlx_specprefill_server.settings.server import Settings
from tests.support.waiting import eventually

from .conftest import client_of, events
from .fakes import FakeEngine

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "Hi"}]


def hang(engine: FakeEngine) -> threading.Event:
    """Answers "a", then nothing until released."""
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("a", end=False), release, *engine.tokens("end")]
    return release


class Asking(threading.Thread):
    """A request beside the test."""

    def __init__(self, base: str, path: str = CHAT, headers: Any = None, **body: Any) -> None:
        super().__init__()
        self._post = (base + path, {"messages": HI} | body, headers)
        self.start()

    def run(self) -> None:
        url, body, headers = self._post
        self.answer = httpx.post(url, json=body, headers=headers, timeout=60)

    def result(self) -> httpx.Response:
        self.join(60)
        return self.answer


# --- shutting down --------------------------------------------------------------------------------------------------


def asked_to_end(server: Server) -> None:
    server.handle_exit(signal.SIGTERM, None)


def test_what_is_in_work_finishes_and_nothing_new_begins(live: Any, engine: FakeEngine) -> None:
    release = hang(engine)
    base, server = live()
    running = [Asking(base), Asking(base, stream=True)]
    assert eventually(lambda: (engine.health().running, engine.health().queued) == (1, 1))
    asked_to_end(server)
    time.sleep(0.3)
    for path in (CHAT, "/v1/messages", "/tokenize"):
        refused = httpx.post(base + path, json={"messages": HI, "max_tokens": 1}, timeout=60)
        assert refused.status_code == (529 if path == "/v1/messages" else 503)
        assert refused.headers["retry-after"]
        assert "shutting down" in refused.text
    health = httpx.get(f"{base}/health", timeout=60)
    assert (health.status_code, health.json()["running"]) == (503, 1)
    release.set()
    whole, stream = (thread.result() for thread in running)
    assert whole.json()["choices"][0]["message"]["content"] == "aend"
    assert events(stream.text)[-2]["choices"][0]["finish_reason"] == "stop"
    assert eventually(lambda: not engine.alive)


def test_with_nothing_in_work_it_ends_at_once(live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 1000)
    _, server = live()
    asked_to_end(server)
    assert eventually(lambda: not engine.alive)


@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_after_the_grace_or_at_a_second_signal_answers_are_ended(
    live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, second: Any
) -> None:
    hang(engine)
    monkeypatch.setattr(process, "GRACE_S", 1000 if second else 0.3)
    base, server = live()
    running = [Asking(base), Asking(base, stream=True)]
    assert eventually(lambda: (engine.health().running, engine.health().queued) == (1, 1))
    asked_to_end(server)
    if second:
        server.handle_exit(second, None)
    whole, stream = (thread.result() for thread in running)
    assert whole.status_code == 503
    assert events(stream.text)[-1] == "[DONE]"
    assert events(stream.text)[-2]["engine_error"]["code"] == "engine_unavailable"
    assert eventually(lambda: not engine.alive)


def test_a_server_that_can_compute_nothing_ends_by_itself_with_an_exit_status(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that launchd or systemd starts another. Until then `/health` says why."""
    monkeypatch.setattr(process, "TELLING_S", 2.0)
    settings = Settings(port=0)
    with bound_sockets(settings.host, 0) as sockets, ThreadPoolExecutor(1) as pool:
        models = Models.of(Service(engine, settings))  # as much of one as it needs
        served = pool.submit(process.serve_models, models, sockets)
        base = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        assert eventually(lambda: httpx.get(f"{base}/health", timeout=60).status_code == 200)
        engine.lost = "the device takes no more work"
        health = httpx.get(f"{base}/health", timeout=60)
        assert (health.status_code, health.json()["error"]["message"]) == (503, engine.lost)
        with pytest.raises(SystemExit) as ended:
            served.result(60)
    assert ended.value.code == 1
    assert not engine.alive


# --- time -----------------------------------------------------------------------------------------------------------


TIME = 2.0  # seconds: the first token comes within them on a busy machine too


def test_a_request_that_takes_too_long_is_given_up(live: Any, engine: FakeEngine) -> None:
    hang(engine)
    base, _ = live()
    headers = {"x-request-timeout": str(TIME)}
    whole = Asking(base, headers=headers).result()
    assert whole.status_code == 504
    assert whole.json()["error"]["code"] == "request_timeout"
    assert whole.headers["x-should-retry"] == "false"
    stream = events(Asking(base, headers=headers, stream=True).result().text)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in stream[:-1]) == "a"
    assert stream[-2]["choices"][0]["finish_reason"] == "length"
    assert stream[-2]["engine_error"]["code"] == "request_timeout"
    assert stream[-1] == "[DONE]"
    assert engine.idle()
    assert engine.reasons == ["cancelled", "cancelled"]


def test_all_answers_of_a_request_are_given_up_with_the_reason(base: str, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [release]
    answer = events(Asking(base, headers={"x-request-timeout": "0.5"}, stream=True, n=3).result().text)
    ends = [c["choices"][0]["index"] for c in answer[:-1] if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert answer[-2]["engine_error"]["code"] == "request_timeout"


def test_an_explanation_that_takes_too_long_is_given_up(live: Any, engine: FakeEngine) -> None:
    engine.inspected = threading.Event()
    base, _ = live()
    answer = Asking(base, "/v1/specprefill/explain", headers={"x-request-timeout": "0.3"}).result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "request_timeout")


@pytest.mark.parametrize("header", ["", "soon", "0", "-1", "nan"])
def test_a_wrong_timeout_is_refused(engine: FakeEngine, header: str) -> None:
    answer = client_of(engine).post(CHAT, json={"messages": HI}, headers={"x-request-timeout": header})
    assert answer.status_code == 400
    assert "x-request-timeout: must be a number of seconds" in answer.text


def test_time_enough_changes_nothing(engine: FakeEngine) -> None:
    client = client_of(engine, max_requests_per_key=1)
    for _ in range(2):
        answer = client.post(CHAT, json={"messages": HI}, headers={"x-request-timeout": "100"})
        assert answer.json()["choices"][0]["message"]["content"] == "Hello"


# --- how many -------------------------------------------------------------------------------------------------------


def test_a_key_has_so_many_requests_in_work(live: Any, engine: FakeEngine) -> None:
    release = hang(engine)
    base, _ = live(api_keys=("one", "two"), max_requests_per_key=2)
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    running = [Asking(base, headers=one), Asking(base, headers=one, stream=True)]
    assert eventually(lambda: engine.health().running + engine.health().queued == 2)
    refused = Asking(base, headers=one).result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
    assert refused.headers["retry-after"]
    assert "x-should-retry" not in refused.headers
    assert httpx.get(f"{base}/v1/models", headers=one).status_code == 200
    other = Asking(base, headers=two)
    assert eventually(lambda: engine.health().queued == 2)
    release.set()
    assert [thread.result().status_code for thread in (*running, other)] == [200, 200, 200]
    assert Asking(base, headers=one).result().status_code == 200


# --- a client that does not read, and an event loop that does not ---------------------------------------------------


@pytest.mark.parametrize("answers", [1, 3])
def test_a_client_that_does_not_read_loses_its_answers(
    live: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    monkeypatch.setattr(generation, "STREAM_BUFFER", 100)
    made = []

    def script(request: Any) -> Any:
        for _ in range(200_000):
            made.append(1)
            yield from engine.tokens("x" * 10, end=False)

    engine.script = script
    engine.pair.context_length = 1 << 22
    base, _ = live()
    host, port = base.removeprefix("http://").split(":")
    body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "n": %d}' % answers
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert eventually(lambda: engine.reasons == ["cancelled"] * answers)
        assert len(made) < 200_000
        assert f"given up: its client has left {100 * answers} events unread" in caplog.text
        text = b""
        while part := connection.recv(1 << 16):
            text += part
    assert b"The client has read too slowly" in text
    assert b"data: [DONE]" in text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_is_not_slow_where_the_event_loop_is(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    monkeypatch.setattr(generation, "STREAM_BUFFER", 8)
    engine.says("x" * 200)
    submit = engine.submit

    def busy(*given: Any) -> Any:
        handle, count = submit(*given), len(engine.requests)
        asyncio.get_running_loop().call_soon(eventually, lambda: len(engine.reasons) >= count)
        return handle

    monkeypatch.setattr(engine, "submit", busy)
    sent = client.post(CHAT, json={"messages": HI, "n": 32, "stream": streamed})
    assert sent.status_code == 200
    assert engine.reasons == ["stop"] * 32
