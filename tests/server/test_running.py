"""Requests in work, as the statistics list them."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from mlx_specprefill import Progress

from .fakes import FakeEngine

STATS, CHAT = "/v1/specprefill/stats", "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "a secret prompt"}]}


def running(base: str, key: str = "") -> list[dict[str, Any]]:
    answer = httpx.get(base + STATS, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60)
    assert "secret" not in answer.text
    found: list[dict[str, Any]] = answer.json()["running"]
    return found


def until(base: str, count: int, key: str = "") -> list[dict[str, Any]]:
    end = time.monotonic() + 60
    while len(found := running(base, key)) != count:
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


def ask(base: str, key: str = "", **body: Any) -> threading.Thread:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    call = threading.Thread(target=lambda: httpx.post(base + CHAT, json=BODY | body, headers=headers, timeout=60))
    call.start()
    return call


def test_a_request_shows_its_stages_until_it_ends(base: str, engine: FakeEngine) -> None:
    reading, answering = threading.Event(), threading.Event()
    engine.script = lambda request: [
        Progress("draft", 8, 8, 3), Progress("prefill", 2, 5), reading, *engine.tokens("abc", end=False), answering
    ]  # fmt: skip
    call = ask(base)
    end = time.monotonic() + 60
    while (one := until(base, 1)[0])["total"] != 5:
        assert time.monotonic() < end, one
    assert [stage["stage"] for stage in one["stages"]] == ["queued", "draft", "prefill"]
    assert (one["done"], one["total"], one["cached_tokens"], one["completion_tokens"]) == (2, 5, 3, 0)
    assert one["prompt_tokens"] == len(engine.requests[0].prompt)
    assert one["request_id"].startswith("req_")
    reading.set()
    while (one := running(base)[0])["completion_tokens"] != 3:
        assert time.monotonic() < end, one
    assert [stage["stage"] for stage in one["stages"]] == ["queued", "draft", "prefill", "decode"]
    since = [stage["since"] for stage in one["stages"]]
    assert since == sorted(since)
    answering.set()
    call.join()
    until(base, 0)


def test_who_has_left_is_not_listed(base: str, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("a", end=False), release]
    with httpx.stream("POST", base + CHAT, json=BODY | {"stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        until(base, 1)
    until(base, 0)
    release.set()


def test_a_key_sees_its_own_requests_and_an_admin_all(live: Any, engine: FakeEngine) -> None:
    release = threading.Event()
    engine.script = lambda request: [*engine.tokens("a", end=False), release]
    base, _ = live(api_keys=("one", "two"), admin_keys=("admin",))
    calls = [ask(base, key) for key in ("one", "two")]
    until(base, 2, "admin")
    assert len(running(base, "one")) == len(running(base, "two")) == 1
    release.set()
    for call in calls:
        call.join()
