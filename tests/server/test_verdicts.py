"""Verdicts as clients see them: a real engine on the demo pair, and scripted verdicts for the rest."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from mlx_specprefill import Engine, GenerationRequest, SamplingParams, Verdict
from mlx_specprefill.engine import loop
from mlx_specprefill_server.deltas import CallDelta, CallEnd, CallStart
from mlx_specprefill_server.generation.reader import Mark
from mlx_specprefill_server.monitoring.verdicts import AnswerVerdict
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pair_settings import make_settings
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.settings import Settings
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


def asked(question: str = "What is the secret code for Anna?") -> dict[str, str]:
    return {"role": "user", "content": f"{LOG}\n{FACTS}\n\n{question}"}


def chat(client: TestClient, name: str = "one", **more: Any) -> dict[str, Any]:
    body = {"messages": [asked()], "specprefill": True, "max_tokens": 12, **more}
    headers = key(name) | {"x-request-id": more.pop("request_id", "turn-1")}
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
    assert entry["counted"] == entry["tokens"] > 0
    assert (entry["first"] is None) == (entry["verdict"] == "same") == (entry["agreeing"] == entry["tokens"])
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


def test_the_next_turn_is_told_of_the_last(client: TestClient) -> None:
    first = chat(client, request_id="early")
    assert "previous" not in first["specprefill"]
    assert eventually(lambda: bool(known(client)["data"]) and is_told(client))
    said = first["choices"][0]["message"]["content"]
    turns = [asked(), {"role": "assistant", "content": said}, {"role": "user", "content": "And for Bernd?"}]
    later = chat(client, messages=turns)["specprefill"]
    assert later["previous"]["request_id"] == "early"
    assert later["previous"]["verdict"] in ("same", "differs")
    assert "previous" not in chat(client, "two", messages=turns)["specprefill"]


def test_an_answer_waits_for_no_verdict_where_nothing_is_verified(engine: FakeEngine) -> None:
    client_of(engine).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert engine.requests[0].specprefill.verify is engine.verifies is False


# --- tool calls -------------------------------------------------------------------------------------------------------


def verdict_on(agrees: list[bool]) -> Verdict:
    size, zeros = len(agrees), np.zeros(len(agrees), np.float32)
    ids = np.arange(size, dtype=np.int32)
    return Verdict("", False, ids, np.array(agrees), np.ones(size, np.bool_), ids, zeros, zeros, zeros)


def test_a_call_s_name_and_each_argument_have_a_verdict_of_their_own() -> None:
    """Tokens 0 to 2 open the call, 3 to 4 write the first argument, 5 to 8 the second."""
    marks = [
        Mark(0, 3, CallStart("find")),
        Mark(3, 5, CallDelta('{"city": "Bern", ')),
        Mark(5, 9, CallDelta('"days": [1, {"a": 2}]}')),
        Mark(9, 10, CallEnd('{"city": "Bern", "days": [1, {"a": 2}]}')),
    ]
    request = GenerationRequest((1, 2, 3), 1, SamplingParams())
    for wrong, expected in (
        (1, {"name": "differs", "arguments": ["same", "same"]}),
        (4, {"name": "same", "arguments": ["differs", "same"]}),
        (8, {"name": "same", "arguments": ["same", "differs"]}),
    ):
        answer = AnswerVerdict("r", 0, "m", request)
        answer.tell(verdict_on([i != wrong for i in range(10)]), marks, lambda ids: "x" * len(ids))
        assert answer.to_dict()["calls"] == [expected]
        assert answer.to_dict()["first"]["text_offset"] == wrong


def test_a_verdict_says_nothing_of_what_follows_a_stop_string() -> None:
    verdict = verdict_on([True, True, False])
    assert verdict.word == "differs"
    assert verdict.of_first(2).word == "same"


def test_an_answer_that_was_cut_inside_a_call_has_a_verdict() -> None:
    marks = [Mark(0, 1, CallStart("find")), Mark(1, 3, CallDelta('{"city": "Be'))]
    answer = AnswerVerdict("r", 0, "m", GenerationRequest((1,), 1))
    answer.tell(verdict_on([True, True, False]), marks, lambda ids: "")
    assert answer.to_dict()["calls"] == [{"name": "same", "arguments": ["differs"]}]


def test_an_unknown_verdict_has_its_reason() -> None:
    answer = AnswerVerdict("r", 0, "m", GenerationRequest((1,), 1))
    answer.tell(Verdict("the server stopped"), [], lambda ids: "")
    assert answer.to_dict() | {"verdict": "unknown", "reason": "the server stopped"} == answer.to_dict()


@pytest.mark.extended
def test_forgetting_drops_verdicts_and_what_a_next_turn_would_be_told(client: TestClient) -> None:
    for name in ("one", "two"):
        chat(client, name)
    assert eventually(lambda: is_told(client) and is_told(client, "two"))
    assert client.delete("/v1/specprefill/cache", headers=key("one")).status_code == 200
    assert (known(client)["data"], len(known(client, "two")["data"])) == ([], 1)
    more = [asked(), {"role": "assistant", "content": "471128"}, {"role": "user", "content": "And for Bernd?"}]
    assert [chat(client, name, messages=more)["specprefill"].get("previous") is None for name in ("one", "two")] == [
        True,
        False,
    ]
