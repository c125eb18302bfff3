"""Behaviour that HTTP clients expect of every path."""

from __future__ import annotations

import asyncio
import gzip
import logging
import zlib
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server import request_body
from mlx_specprefill_server.http.paths import HeadMiddleware
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over

from .conftest import client_of
from .fakes import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
GZIP = {"content-encoding": "gzip"}


def got_paths(engine: FakeEngine) -> list[str]:
    document = app_over(engine, Settings()).openapi()
    paths = [path for path, operations in document["paths"].items() if "get" in operations]
    return [path.replace("{model_id}", "demo/target") for path in paths]


def test_head_answers_wherever_get_does(client: TestClient, engine: FakeEngine) -> None:
    paths = got_paths(engine)
    assert {"/v1/models", "/metrics", "/v1/specprefill/stats"} <= set(paths)
    for path in [*paths, "/", "/web/app.js", "/openapi.json", "/v1/models/nobody", "/nowhere"]:
        head, get = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (get.status_code, b""), path
        assert head.headers.get("content-type") == get.headers.get("content-type") or path == "/"
    assert client.head("/v1/chat/completions").status_code == 405


def test_head_of_a_stream_without_end_ends(base: str) -> None:
    for _ in range(2):
        assert httpx.head(f"{base}/v1/specprefill/stats/stream", timeout=30).status_code == 200
    assert httpx.head(f"{base}/v1/models", timeout=30).headers["content-length"] != "0"
    assert httpx.get(f"{base}/health", timeout=30).json()["status"] == "ok"


def test_head_ends_an_app_that_does_not_look_whether_the_client_has_left() -> None:
    start, sent = {"type": "http.response.start", "status": 200, "headers": []}, list[Any]()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send(start)
        while True:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "method": "HEAD", "path": "/v1/specprefill/stats/stream"}
        await asyncio.wait_for(HeadMiddleware(endless)(scope, asyncio.Event().wait, send), 5)

    asyncio.run(ask())
    assert sent == [start, {"type": "http.response.body", "body": b""}]


def test_a_key_is_asked_of_head_too(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=("k",))
    for path in ("/v1/models", "/v1/models/", "/metrics/"):
        assert client.head(path).status_code == 401
    for path in ("/health", "/health/", "/"):
        assert client.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/models", "/chat/completions", "/messages", "/responses", "/completions"])
def test_a_missing_v1_makes_no_difference(client: TestClient, path: str) -> None:
    """Some clients take the address of the server for that of its API."""
    answers = [client.request("GET" if path == "/models" else "POST", f"{base}{path}", json={}) for base in ("", "/v1")]
    assert answers[0].status_code == answers[1].status_code != 404
    assert answers[0].json() == answers[1].json()


def test_a_last_slash_makes_no_difference(client: TestClient) -> None:
    for path in ("/v1/models", "/health", "/v1/models/demo/target", "/version"):
        assert client.get(path + "/").status_code == client.get(path).status_code == 200
    for path in ("/v1/chat/completions/", "/v1/chat/completions//"):
        assert client.post(path, json=CHAT).json()["choices"][0]["message"]["content"] == "Hello"
    refused = client.post("/v1/messages/", json={}).json()
    assert refused["type"] == "error"


def test_bodies_may_come_compressed(client: TestClient) -> None:
    plain = orjson.dumps(CHAT)
    for name in ("gzip", "x-gzip", " GZIP", "identity"):
        body = plain if name == "identity" else gzip.compress(plain)
        answer = client.post("/v1/chat/completions", content=body, headers={"content-encoding": name})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip"])
def test_other_encodings_are_refused_by_name(client: TestClient, encoding: str) -> None:
    body = zlib.compress(orjson.dumps(CHAT))
    answer = client.post("/v1/chat/completions", content=body, headers={"content-encoding": encoding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert encoding in answer.json()["error"]["message"]
    assert answer.headers["accept-encoding"] == "gzip"


def test_a_compressed_body_is_held_to_the_limit_before_it_is_unfolded(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "BODY_LIMIT", 10_000)
    client = client_of(engine)
    bomb = gzip.compress(orjson.dumps({"messages": "a" * 50_000_000}))
    assert len(bomb) > 10_000
    assert client.post("/v1/chat/completions", content=bomb[:9_999], headers=GZIP).status_code == 413
    small = gzip.compress(b" " * 5_000_000)
    assert len(small) < 10_000
    assert client.post("/v1/chat/completions", content=small, headers=GZIP).status_code == 413


@pytest.mark.parametrize(
    "body",
    [b"no gzip", gzip.compress(b"{}")[:-4], gzip.compress(b"{}") + b"more", b"", gzip.compress(b"{}") * 2],
    ids=["not gzip", "cut off", "more behind it", "empty", "twice"],
)
def test_a_broken_compressed_body_is_a_400(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/chat/completions", content=body, headers=GZIP)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank"])
def test_what_this_server_does_not_do_is_said_in_a_sentence(client: TestClient, path: str) -> None:
    for url in (path, path + "/"):
        answer = client.post(url, json={"input": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        assert answer.json()["error"]["message"].startswith("This server generates text and ")


def test_the_model_list_is_anthropics_too(base: str, engine: FakeEngine) -> None:
    with anthropic.Anthropic(base_url=base, api_key="k", max_retries=0, _strict_response_validation=True) as sdk:
        (model,) = sdk.models.list()
        assert (model.type, model.display_name, model.id) == ("model", "demo/target", "demo/target")
        assert sdk.models.retrieve("demo/target") == model
    assert model.max_input_tokens == engine.pair.context_length


def test_an_expected_refusal_logs_no_traceback(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for body in ({}, {"messages": 1}, {**CHAT, "grammar": "?!"}, {**CHAT, "top_p": 2}):
            assert client.post("/v1/chat/completions", json=body).status_code == 400
    assert not [record for record in caplog.records if record.exc_info]
