"""The live numbers, the same as a stream, and what is kept for later requests."""

from __future__ import annotations

import json
from typing import Any

import httpx
from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import FakeEngine

STATS, CACHE = "/v1/specprefill/stats", "/v1/specprefill/cache"


def chat(client: TestClient, text: str = "a secret prompt") -> None:
    body = {"messages": [{"role": "user", "content": text}], "specprefill": True}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_one_moment(client: TestClient) -> None:
    stats = client.get(STATS).json()
    assert {"waiting", "prefilling", "decoding", "tokens_per_second", "prefix_hits", "memory"} <= set(stats)
    assert stats["memory"]["target_weights"] == 1000
    assert stats["fallbacks"] == {"draft": 1}
    assert stats["recent"] == []


def test_recent_answers_have_their_report_and_nothing_of_the_text(client: TestClient) -> None:
    chat(client)
    response = client.get(STATS)
    (recent,) = response.json()["recent"]
    assert recent["finish"] == "stop"
    assert recent["completion_tokens"] == 6
    assert recent["specprefill"]["mode"] == "sparse"
    assert recent["request_id"].startswith("req_")
    assert "secret" not in response.text


def test_the_newest_answers_are_held(client: TestClient) -> None:
    for i in range(52):
        chat(client, "a" * (i + 1))
    recent = client.get(STATS).json()["recent"]
    lengths = [answer["specprefill"]["prompt_tokens"] for answer in recent]
    assert len(lengths) == 50
    assert lengths == sorted(lengths, reverse=True)


def test_the_stream_repeats_the_snapshot_until_the_server_stops(engine: FakeEngine, live: Any) -> None:
    base, server = live()
    seen = []
    with httpx.stream("GET", f"{base}{STATS}/stream?interval=0.2", timeout=60) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
            server.should_exit = len(seen) >= 2
    assert len(seen) >= 2
    assert {"object", "time", "recent"} <= set(seen[0])
    assert seen[1]["time"] > seen[0]["time"]


def test_a_bad_interval_is_refused(client: TestClient) -> None:
    assert client.get(f"{STATS}/stream?interval=0").status_code == 400


def test_what_is_kept_is_listed_and_dropped(client: TestClient, engine: FakeEngine) -> None:
    first, second = client.get(CACHE).json()["data"]
    assert (first["kind"], first["tokens"], first["hits"]) == ("target", 100, 1)
    assert client.delete(f"{CACHE}/{second['id']}").json() == {"id": second["id"], "deleted": True}
    assert [entry.id for entry in engine.kept] == [first["id"]]
    missing = client.delete(f"{CACHE}/{second['id']}")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "not_found"
    assert client.delete(CACHE).status_code == 200
    assert engine.kept == []


def test_nothing_leaks_without_the_key(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=("geheim",))
    for path in (STATS, f"{STATS}/stream", CACHE):
        assert client.get(path).status_code == 401
    assert client.delete(CACHE).status_code == 401
    assert client.post("/v1/specprefill/explain", json={"prompt": "a"}).status_code == 401
    assert len(engine.kept) == 2
    assert client.get(CACHE, headers={"authorization": "Bearer geheim"}).status_code == 200
