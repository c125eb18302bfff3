"""The server's description of itself."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import __version__

from ..waiting import eventually
from .conftest import client_of
from .fakes import CHATML, FakeEngine


def test_the_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_the_properties_have_no_paths(client: TestClient) -> None:
    body = client.get("/props").json()
    assert body["default_generation_settings"]["n_ctx"] == 4096
    assert body["total_slots"] == 4
    assert body["model_alias"] == body["model_path"] == "demo/target"
    assert body["chat_template"] == CHATML
    assert body["eos_token"] == "<|im_end|>"


def test_slots_follow_what_runs(engine: FakeEngine, client: TestClient) -> None:
    def busy() -> list[bool]:
        slots: list[dict[str, Any]] = client.get("/slots").json()
        assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
        return [slot["is_processing"] for slot in slots]

    assert busy() == [False] * 4
    gate = threading.Event()
    engine.script = lambda request: [gate, *engine.tokens("x")]
    thread = threading.Thread(target=lambda: client_of(engine).post("/v1/completions", json={"prompt": "x"}))
    thread.start()
    assert eventually(lambda: engine._running == 1)
    assert busy() == [True, False, False, False]
    gate.set()
    thread.join()


def test_a_full_house_can_be_told_by_status(engine: FakeEngine, client: TestClient) -> None:
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200
    engine._running = 4
    answer = client.get("/slots?fail_on_no_slot=1")
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", ["/metrics", "/props", "/slots", "/version"])
def test_the_key_is_needed(engine: FakeEngine, path: str) -> None:
    client = client_of(engine, api_keys=("right",))
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"authorization": "Bearer right"}).status_code == 200
