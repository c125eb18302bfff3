"""Before a client has said who it is: connections, headers and bodies that never come, come slowly or have no end."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from mlx_specprefill_server.generation import generation
from mlx_specprefill_server.http import connections
from mlx_specprefill_server.http.connections import RESERVED, DescriptorsError, raise_open_files_limit
from tests.support.waiting import eventually

from .fakes import FakeEngine

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'
KEY = {"api_keys": ("k",)}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"


@pytest.fixture
def dial() -> Iterator[Any]:
    """Opens plain connections."""
    with ExitStack() as stack:

        def connect(base: str) -> socket.socket:
            host, port = base.removeprefix("http://").split(":")
            return stack.enter_context(socket.create_connection((host, int(port)), timeout=60))

        yield connect


def everything(connection: socket.socket) -> bytes:
    """Until the server closes it."""
    text = b""
    try:
        while part := connection.recv(1 << 16):
            text += part
    except ConnectionResetError:
        pass
    return text


def healthy(base: str) -> bool:
    return httpx.get(f"{base}/health", timeout=60).status_code == 200


def test_silent_connections_close_the_server_to_nobody(live: Any, dial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there may be connections, and none of them given up for its silence yet."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1000)
    base, server = live(connections=50, **KEY)
    for _ in range(200):
        dial(base)
    assert eventually(lambda: len(server.server_state.connections) <= 51)
    assert healthy(base)
    whole = httpx.post(base + CHAT, content=BODY, headers={"authorization": "Bearer k"}, timeout=60)
    assert whole.status_code == 200


def test_connections_with_requests_in_work_are_never_closed_for_new_ones(live: Any, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [release, *engine.tokens("end")]
    base, _ = live(connections=2)
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(httpx.post(base + CHAT, content=BODY, timeout=60)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: engine.health().running + engine.health().queued == 2)
    refused = httpx.get(f"{base}/health", timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert refused.headers["retry-after"]
    release.set()
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert eventually(lambda: healthy(base))


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (HEAD, b"HTTP/1.1 408 "),
        (HEAD + b"content-length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he", b"HTTP/1.1 200 "),
    ],
    ids=["silent", "headers", "body", "second request"],
)
def test_what_does_not_come_is_not_awaited_for_ever(
    live: Any, dial: Any, sent: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.5)
    base, _ = live(**KEY)
    connection = dial(base)
    connection.sendall(sent)
    answer = everything(connection)
    assert answer.startswith(status)
    assert bool(answer) == bool(status)
    assert healthy(base)


def test_a_byte_now_and_then_is_no_headers(live: Any, dial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.5)
    base, _ = live()
    connection = dial(base)
    connection.settimeout(0.05)
    answer = b""
    for byte in HEAD * 50:
        try:
            connection.sendall(bytes([byte]))
            answer = connection.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            break
        break
    else:
        pytest.fail("the connection is still open")
    assert answer.startswith((b"", b"HTTP/1.1 408 "))


def test_the_beginning_of_a_next_request_leaves_the_answer_alone(
    live: Any, dial: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    release = threading.Event()
    engine.script = lambda request: [release, *engine.tokens("end")]
    base, _ = live()
    connection = dial(base)
    connection.sendall(b"POST %s HTTP/1.1\r\nhost: localhost\r\n" % CHAT.encode())
    connection.sendall(b"content-length: %d\r\n\r\n%sGET /he" % (len(BODY), BODY))
    threading.Timer(0.5, release.set).start()
    assert b'"content":"end"' in everything(connection)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"x: " + b"a" * 70_000,
        HEAD + b"x: " + b"a" * 70_000 + b"\r\n\r\n",
        HEAD + b"".join(b"x%d: a\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 70_000,
    ],
    ids=["endless", "one long header", "many headers", "path"],
)
def test_headers_have_so_many_bytes(live: Any, dial: Any, sent: bytes) -> None:
    base, _ = live(**KEY)
    connection = dial(base)
    connection.sendall(sent)
    answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer
    assert healthy(base)


def test_many_headers_of_a_usual_size_are_taken(live: Any) -> None:
    base, _ = live(**KEY)
    headers = {f"x-{i}": "a" * 100 for i in range(300)} | {"authorization": "Bearer k"}
    with httpx.Client(base_url=base, headers=headers, timeout=60) as client:
        assert [client.post(CHAT, content=BODY).status_code for _ in range(5)] == [200] * 5


def test_a_long_answer_may_take_longer_than_its_request(
    live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections, "BODY_TIMEOUT_S", 0.2)
    release = threading.Event()
    engine.script = lambda request: [release, *engine.tokens("end")]
    base, _ = live()
    threading.Timer(0.5, release.set).start()
    assert httpx.post(base + CHAT, content=BODY, timeout=60).status_code == 200


@pytest.mark.extended
def test_nobody_who_reads_nothing_keeps_a_connection(
    live: Any, dial: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRITE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(generation, "STREAM_BUFFER", 1 << 20)
    engine.script = lambda request: [*engine.tokens("x" * 60_000, end=False)]
    engine.pair.context_length = 1 << 20
    base, server = live()
    connection = dial(base)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = BODY[:-1] + b', "stream": true}'
    connection.sendall(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    )
    connection.sendall(body)
    assert eventually(lambda: bool(engine.requests))
    assert eventually(lambda: engine.health().running + len(server.server_state.connections) == 0)
    assert "its client has read nothing for 0.5 s" in caplog.text


def test_nonsense_is_answered_in_json(base: str, dial: Any) -> None:
    connection = dial(base)
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    answer = everything(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"invalid_http"' in answer


# --- open files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process with ten files open and the limits that a test sets."""
    state = {"now": (256, resource.RLIM_INFINITY)}
    monkeypatch.setattr(os, "listdir", lambda _: ["x"] * 10)
    monkeypatch.setattr(resource, "getrlimit", lambda _: state["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, to: state.update(now=to))
    return state


def test_the_limit_on_open_files_is_raised_as_far_as_needed(limits: Any) -> None:
    assert raise_open_files_limit(1024) == 1024
    assert limits["now"] == (10 + RESERVED + 1024, resource.RLIM_INFINITY)
    assert raise_open_files_limit(10**6) == 10_240 - 10 - RESERVED


def test_few_open_files_mean_few_connections(limits: Any, caplog: pytest.LogCaptureFixture) -> None:
    limits["now"] = (40, 64)
    assert raise_open_files_limit(1024) == 64 - 10 - RESERVED
    assert limits["now"] == (64, 64)
    assert "the limit on open files is 64" in caplog.text


def test_too_few_open_files_are_told(limits: Any) -> None:
    limits["now"] = (30, 40)
    with pytest.raises(
        DescriptorsError, match=r"is 40, and this server needs at least 42: raise it with `ulimit -Hn 42`"
    ):
        raise_open_files_limit(1024)


def test_no_limit_is_none(limits: Any) -> None:
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert raise_open_files_limit(5000) == 5000
