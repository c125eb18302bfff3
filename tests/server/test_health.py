from __future__ import annotations

from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import FakeEngine


def test_head_of_the_root(client: TestClient) -> None:
    answer = client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_moving_engine_is_healthy(client: TestClient) -> None:
    answer = client.get("/health")
    assert answer.status_code == 200
    body = {
        "status": "ok",
        "model": "demo/target",
        "running": 0,
        "queued": 0,
        "background": False,
        "heartbeat_age_s": 0,
    }
    assert answer.json() == body | {"prompts_waiting": 0, "prompts_longest_s": 0}
    assert client.head("/health").status_code == 200


def test_a_long_step_is_not_death(engine: FakeEngine) -> None:
    client = client_of(engine)
    engine.heartbeat_age_s = 599
    assert client.get("/health").status_code == 200
    engine.heartbeat_age_s = 601
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "error"
    assert "silent for 601 s" in answer.json()["error"]["message"]


def test_a_dead_thread_is_unhealthy(client: TestClient, engine: FakeEngine) -> None:
    engine.alive = False
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert answer.headers["retry-after"]
