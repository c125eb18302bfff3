"""Large bodies share a bounded memory until their requests end; small ones always pass."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from typing import Any

import httpx
import pytest

from mlx_specprefill_server.http import body_room
from tests.support.waiting import eventually

from .fakes import FakeEngine

CHAT = "/v1/chat/completions"
SMALL, LARGE = (
    json.dumps({"messages": [{"role": "user", "content": "x" * size}], "max_tokens": 1}).encode() for size in (1, 2000)
)


def begin(base: str, body: bytes) -> socket.socket:
    """Send all of a request but its last byte."""
    host, port = base.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body[:-1])
    return connection


def status(base: str, body: bytes) -> int:
    return httpx.post(base + CHAT, content=body, timeout=60).status_code


def test_bodies_that_do_not_end_take_bounded_memory(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "FREE", 1000)
    monkeypatch.setattr(body_room, "LIMIT", 3 * (len(LARGE) - 1000) - 3)
    base, _ = live()
    begun = [begin(base, LARGE) for _ in range(2)]
    assert eventually(lambda: status(base, LARGE) == 503)
    refused = httpx.post(base + CHAT, content=LARGE, timeout=60)
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert refused.headers["retry-after"]
    assert status(base, SMALL) == 200
    begun[0].sendall(LARGE[-1:])
    assert begun[0].recv(12) == b"HTTP/1.1 200"
    assert status(base, LARGE) == 200
    for connection in begun:
        connection.close()
    for _ in range(5):
        assert status(base, LARGE) == 200


def test_a_refused_body_leaves_nothing_behind(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_room, "FREE", 1000)
    base, _ = live()
    for limit, expected in ((len(LARGE) - 1001, 503), (len(LARGE) - 1000, 200)) * 2:
        monkeypatch.setattr(body_room, "LIMIT", limit)
        assert status(base, LARGE) == expected


def test_a_body_that_was_packed_counts_unpacked_and_as_long_as_its_request_waits(
    live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_room, "FREE", 1000)
    monkeypatch.setattr(body_room, "LIMIT", 2 * (len(LARGE) - 1000) - 1)
    release = threading.Event()
    engine.script = lambda request: [release, *engine.tokens("end")]
    base, _ = live()
    packed = {"content": gzip.compress(LARGE), "headers": {"content-encoding": "gzip"}, "timeout": 60}
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(httpx.post(base + CHAT, **packed).status_code))
    waiting.start()
    assert eventually(lambda: engine.health().running + engine.health().queued == 1)
    assert httpx.post(base + CHAT, **packed).status_code == 503
    release.set()
    waiting.join(60)
    assert answers == [200]
    assert httpx.post(base + CHAT, **packed).status_code == 200
