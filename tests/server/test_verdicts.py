"""Verdicts as clients see them: a real engine on the demo pair."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from mlx_specprefill import Engine, Verdict
from mlx_specprefill.engine.thread import loop
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.settings.pair import make_settings
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over
from tests.support.waiting import eventually

from .conftest import client_of
from .fakes import FakeEngine

KEYS = {"api_keys": ("one", "two")}
PATH = "/v1/specprefill/verdicts"
LOG = "\n".join(f"On day {day} the ship sailed {day * 7 % 50} miles and met nobody." for day in range(60))
FACTS = "\n".join(f"The secret code for {name} is {code}." for name, code in (("Anna", 471128), ("Bernd", 902217)))


@pytest.fixture(scope="module")
def engine_and_settings() -> Iterator[tuple[Engine, Settings]]:
    pair = find_pair("demo")
    settings = make_settings(pair, calibration_file=None, **KEYS)
    with Engine(load(pair, "float32", settings), settings.engine_config()) as engine:
        yield engine, settings


@pytest.fixture
def client(engine_and_settings: tuple[Engine, Settings], monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """One event loop for all requests: a verdict comes after its answer."""
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    with TestClient(app_over(*engine_and_settings), base_url="http://localhost") as client:
        yield client


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def chat(client: TestClient, name: str = "one") -> dict[str, Any]:
    message = {"role": "user", "content": f"{LOG}\n{FACTS}\n\nWhat is the secret code for Anna?"}
    body = {"messages": [message], "specprefill": True, "max_tokens": 12}
    headers = key(name) | {"x-request-id": "turn-1"}
    answer = client.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["specprefill"]["mode"] in ("sparse", "full")
    return found


def known(client: TestClient, name: str = "one") -> dict[str, Any]:
    found: dict[str, Any] = client.get(PATH, headers=key(name)).json()
    return found


def is_told(client: TestClient, name: str = "one") -> bool:
    return all(entry["verdict"] != "pending" for entry in known(client, name)["data"])


@pytest.mark.extended
def test_a_verdict_is_told_everywhere_and_to_its_own_key_alone(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    chat(client)
    assert eventually(lambda: bool(known(client)["data"]) and is_told(client))
    (entry,) = known(client)["data"]
    assert entry["verdict"] in ("same", "differs")
    assert entry["request_id"] == "turn-1"
    assert client.get(f"{PATH}/turn-1", headers=key("one")).json()["data"] == [entry]
    assert known(client)["counts"] == {"same": 0, "differs": 0, "unknown": 0, "pending": 0} | {entry["verdict"]: 1}
    stats = client.get("/v1/specprefill/stats", headers=key("one")).json()
    assert stats["verdicts"] == known(client)["counts"]
    assert known(client, "two") == {"object": "list", "data": [], "counts": dict.fromkeys(known(client)["counts"], 0)}
    other = client.get(f"{PATH}/turn-1", headers=key("two"))
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "not_found"
    metrics = client.get("/metrics", headers=key("one")).text
    assert f'specprefill_verdicts_total{{model_name="demo",verdict="{entry["verdict"]}"}} 1.0' in metrics
    (line,) = [record for record in caplog.records if record.getMessage().startswith("verdict ")]
    assert line.fields["request_id"] == "turn-1"  # type: ignore[attr-defined]
    assert "Anna" not in json.dumps(entry) + str(vars(line))


def test_an_answer_waits_for_no_verdict_where_nothing_is_verified(engine: FakeEngine) -> None:
    client_of(engine).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert engine.requests[0].specprefill.verify is engine.verifies is False


def test_a_verdict_says_nothing_of_what_follows_a_stop_string() -> None:
    verdict = Verdict(np.array([True, True, False]), np.ones(3, np.bool_))
    assert verdict.word == "differs"
    assert verdict.of_first(2).word == "same"


@pytest.mark.extended
def test_forgetting_drops_verdicts(client: TestClient) -> None:
    for name in ("one", "two"):
        chat(client, name)
    assert eventually(lambda: is_told(client) and is_told(client, "two"))
    assert client.delete("/v1/specprefill/cache", headers=key("one")).status_code == 200
    assert (known(client)["data"], len(known(client, "two")["data"])) == ([], 1)
