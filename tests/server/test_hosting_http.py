"""Several models over HTTP, on fake engines: which one answers, what is told of them, and who may move them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.record_file import DiskRow
from mlx_specprefill_server.models.entry import Entry
from mlx_specprefill_server.running.app import create_app

from .conftest import client_of
from .fakes import FakeEngine
from .hosting import FakeHost, entry, models_of
from .hosting import host as host

HI = [{"role": "user", "content": "Hi"}]
CACHE = "/v1/specprefill/cache"


@pytest.fixture
def server(host: FakeHost) -> Callable[..., TestClient]:
    def make(*entries: Entry, max_models: int | None = None, **settings: object) -> TestClient:
        known = entries or (entry("a", "first"), entry("b"), entry("org/c"))
        app = create_app(models_of(host, *known, max_models=max_models, **settings))
        # One event loop for all requests, as a server has.
        return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    return make


def says(client: TestClient, model: str | None) -> str:
    body = {"messages": HI} | ({} if model is None else {"model": model})
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/chat/completions/input_tokens": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/specprefill/explain": {"prompt": "Hi"},
    "/tokenize": {"content": "Hi"},
    "/detokenize": {"tokens": [72]},
    "/apply-template": {"messages": HI},
}


def test_the_model_of_a_request_answers(server: Callable[..., TestClient]) -> None:
    with server() as client:
        assert says(client, "b") == "I am b"
        assert says(client, "first") == says(client, None) == says(client, "gpt-4o") == "I am a"
        assert says(client, "org/c") == "I am org/c"


@pytest.mark.parametrize(("path", "body"), ASKED.items())
def test_every_endpoint_loads_the_model_that_it_names(
    server: Callable[..., TestClient], host: FakeHost, path: str, body: dict[str, Any]
) -> None:
    with server() as client:
        reply = client.post(path, json=body | {"model": "b"})
        assert reply.status_code == 200, reply.text
        assert host.loaded == ["b"]


@pytest.mark.parametrize(("path", "body"), ASKED.items())
def test_what_has_mistakes_loads_nothing(
    server: Callable[..., TestClient], host: FakeHost, path: str, body: dict[str, Any]
) -> None:
    with server(strict_model=True) as client:
        assert client.post(path, json=body | {"model": "d"}).status_code == 404
        wrong = dict.fromkeys(body, 7.5)
        assert client.post(path, json=wrong | {"model": "b"}).status_code == 400
        assert host.loaded == []


def test_the_list_tells_of_all(server: Callable[..., TestClient], host: FakeHost) -> None:
    host.broken["b"] = "its weights are cut off"
    with server(entry("a"), entry("b", "other"), entry("c", pin=True)) as client:
        assert says(client, None) == "I am a"
        assert client.post("/v1/models/b/load").status_code == 500
        a, b, c = client.get("/v1/models").json()["data"]
        assert (a["state"], a["default"], a["scorer"]) == ("loaded", True, "draft")
        assert a["memory"] == {"weights": 1100, "requests": 60, "caches": 20}
        assert (b["state"], b["error"], b["aliases"]) == ("failed", "its weights are cut off", ["other"])
        assert b["memory"] is None
        assert (c["pinned"], c["rule"]) == (True, "default")
        assert client.get("/v1/models/other").json()["id"] == "b"
        assert client.get("/v1/models/d").status_code == 404
        assert client.get("/health").json()["models"]["a"] == "loaded"


def test_models_are_loaded_and_unloaded_by_name(server: Callable[..., TestClient], host: FakeHost) -> None:
    with server(entry("a"), entry("org/b"), entry("c", pin=True)) as client:
        reply = client.post("/v1/models/org/b/load")
        assert (reply.status_code, reply.json()["state"]) == (200, "loaded")
        assert client.post("/v1/models/org/b/load").json()["state"] == "loaded"
        assert host.loaded == ["org/b"]
        tools = [{"type": "function", "function": {"name": "f"}}]
        client.post("/v1/chat/completions", json={"messages": HI, "model": "org/b", "tools": tools}).raise_for_status()
        app: Any = client.app
        room = app.state.models.state.bodies
        assert room.taken > 0  # what is remembered of tools
        host.engines["org/b"]._waiting = 1
        refused = client.post("/v1/models/org/b/unload")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_in_use")
        host.engines["org/b"]._waiting = 0
        assert client.post("/v1/models/org/b/unload").json()["state"] == "unloaded"
        assert room.taken == 0
        assert client.post("/v1/models/org/b/unload").json()["state"] == "unloaded"
        pinned = client.post("/v1/models/c/unload")
        assert (pinned.status_code, pinned.json()["error"]["code"]) == (409, "model_pinned")
        assert client.post("/v1/models/d/load").status_code == 404


def test_only_admins_move_models_where_there_are_admins(server: Callable[..., TestClient]) -> None:
    with server(api_keys=("user",), admin_keys=("boss",)) as client:
        for what in ("load", "unload"):
            assert client.post(f"/v1/models/a/{what}", headers={"x-api-key": "user"}).status_code == 403
            assert client.post(f"/v1/models/a/{what}", headers={"x-api-key": "boss"}).status_code == 200
    with server(api_keys=("user",)) as client:
        assert client.post("/v1/models/a/load", headers={"x-api-key": "user"}).status_code == 200
        assert client.post("/v1/models/a/load").status_code == 401


def test_a_server_with_one_model_moves_nothing(engine: FakeEngine) -> None:
    client = client_of(engine)
    for what in ("load", "unload"):
        reply = client.post(f"/v1/models/demo/target/{what}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "model_pinned")
        assert client.post(f"/v1/models/other/{what}").status_code == 404


def test_no_room_is_said_with_a_time(server: Callable[..., TestClient], host: FakeHost) -> None:
    with server(max_models=1) as client:
        says(client, "a")
        host.engines["a"]._waiting = 1
        for path in ("/v1/chat/completions", "/v1/messages"):
            reply = client.post(path, json={"messages": HI, "max_tokens": 5, "model": "b"})
            assert reply.status_code == (503 if path == "/v1/chat/completions" else 529)
            assert reply.headers["retry-after"] == "5"
            assert "--max-models is 1" in reply.json()["error"]["message"]


def test_metrics_carry_the_models_names(server: Callable[..., TestClient]) -> None:
    with server() as client:
        says(client, "a"), says(client, "b")
        text = client.get("/metrics").text
        assert text.count("# TYPE vllm:request_success_total") == 1
        for name in "ab":
            assert f'specprefill_requests_total{{mode="full",model_name="{name}",reason="other"}} 1.0' in text
            assert f'specprefill_engine_up{{model_name="{name}"}} 1.0' in text
        assert 'specprefill_engine_up{model_name="org/c"}' not in text
        samples = [line for line in text.splitlines() if not line.startswith("#")]
        assert all('model_name="' in line for line in samples)
        assert len({line.rpartition(" ")[0] for line in samples}) == len(samples)


def test_statistics_are_of_a_model_in_memory(server: Callable[..., TestClient]) -> None:
    with server() as client:
        none = client.get("/v1/specprefill/stats")
        assert (none.status_code, none.json()["error"]["code"]) == (503, "model_not_loaded")
        says(client, "b")
        assert client.get("/v1/specprefill/stats").json()["model"] == "b"  # the only one
        says(client, "a")
        assert client.get("/v1/specprefill/stats").json()["model"] == "a"  # the default one
        assert client.get("/v1/specprefill/stats?model=b").json()["model"] == "b"
        assert client.get("/v1/specprefill/stats?model=d").status_code == 404


def test_forgetting_reaches_every_model(server: Callable[..., TestClient], host: FakeHost, tmp_path: Path) -> None:
    """In memory or on disk alone; a name narrows to one."""
    for name in ("b", "org/c"):
        host.folders[name] = tmp_path / name.replace("/", "-")
        tier = DiskTier(host.folders[name], 1 << 30)
        tier.write(DiskRow("ab", "model:256", "", "0badcafe", 1, 0), {"a": mx.zeros(1)})
        tier.close()

    def left() -> tuple[bool, bool, bool]:
        files = (
            {path for path in host.folders[name].iterdir() if path.suffix == ".safetensors"} for name in host.folders
        )
        return (bool(host.engines["a"].kept), *map(bool, files))

    with server() as client:
        assert says(client, "a")
        assert left() == (True, True, True)
        assert client.delete(f"{CACHE}?model=unknown").status_code == 404
        assert client.delete(f"{CACHE}?model=b").json() == {"deleted": True}
        assert left() == (True, False, True)
        assert client.delete(CACHE).status_code == 200
        assert left() == (False, False, False)
        assert not any(b"0badcafe" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        (host.folders["b"] / "pinned").rmdir()
        (host.folders["b"] / "pinned").touch()
        refused = client.delete(CACHE)
        assert (refused.status_code, "could be deleted" in refused.text) == (500, True)
