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
from mlx_specprefill_server.app import create_app
from mlx_specprefill_server.deltas import CallDelta, CallEnd, CallStart
from mlx_specprefill_server.generation.reader import Mark
from mlx_specprefill_server.monitoring.answers import AnswerVerdict
from mlx_specprefill_server.pair_loading import load, make_settings
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.promise import Promises
from mlx_specprefill_server.settings import Settings
from tests.support.waiting import eventually

from .conftest import client_of
from .fakes import FakeEngine

KEYS = {"api_keys": ("one", "two")}
AUTO = {"specprefill_keep_pct": "auto"}
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
    with TestClient(create_app(*engine_and_settings), base_url="http://localhost") as client:
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


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_gets_what_full_reading_says(client: TestClient, stream: bool) -> None:
    """With the least share kept the sparse answer is another one; it must never be seen."""
    least: dict[str, Any] = {"messages": [asked("How far did the ship sail on day 7?")], "specprefill_keep_pct": 0.01}
    truth = chat(client, **least | {"specprefill": False})
    assert text_of(chat(client, **least)) != text_of(truth)
    if not stream:
        found = chat(client, **least, specprefill_verify="wait")
        assert text_of(found) == text_of(truth)
        assert (found["specprefill"]["mode"], found["specprefill"]["verdict"]) == ("full", "differs")
        return
    body = {"specprefill": True, "max_tokens": 12, "stream": True, "specprefill_verify": "wait", **least}
    sent = client.post("/v1/chat/completions", json=body, headers=key("one")).text
    chunks = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith("data: {")]
    parts = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(parts) == text_of(truth)


def test_who_waits_gets_the_sparse_answer_where_full_reading_agrees(client: TestClient) -> None:
    found = chat(client, specprefill_verify="wait", specprefill_keep_pct=0.9)
    assert (found["specprefill"]["mode"], found["specprefill"]["verdict"]) == ("sparse", "same")
    assert text_of(found) == text_of(chat(client, specprefill=False))


def test_a_promised_share_is_tried_on_answers_that_wait_and_then_used(client: TestClient) -> None:
    """With a promise that two verdicts keep: the third answer does not wait any more."""
    client.app.state.models.state.promises = Promises(None, 0.95)  # type: ignore[attr-defined]
    truth = text_of(chat(client, specprefill=False))
    for number in range(3):
        found = chat(client, specprefill_keep_pct="auto")
        promise = found["specprefill"]["promise"]
        assert (promise["share"], promise["max_differ"], promise["held"]) == (0.1, 0.95, number > 1)
        assert promise["same"] + promise["differs"] == number
        assert text_of(found) == truth
        assert ("verdict" in found["specprefill"]) == (number <= 1)
    assert sum(known(client)["counts"].values()) == len(known(client)["data"]) == 3


def test_a_prompt_that_is_too_short_is_not_held_back(client: TestClient) -> None:
    client.app.state.models.state.promises = Promises(None, 0.05)  # type: ignore[attr-defined]
    body = {"messages": [{"role": "user", "content": "Hello"}], "specprefill": None, "specprefill_keep_pct": "auto"}
    report = chat(client, **body)["specprefill"]
    assert report["mode"] == "full"
    assert "verdict" not in report


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_no_one_can_wait_where_nothing_is_verified(engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "specprefill_verify": "wait"}
    refused = client_of(engine).post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "specprefill_verify"
    auto = client_of(engine).post("/v1/chat/completions", json=body | {"specprefill_verify": "late"} | AUTO)
    assert (auto.status_code, auto.json()["error"]["param"]) == (400, "specprefill_keep_pct")
    wrong = client_of(engine).post("/v1/chat/completions", json=body | {"specprefill_verify": "now"})
    assert wrong.status_code == 400


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


def test_a_stop_string_ends_what_a_held_answer_says(engine: FakeEngine) -> None:
    """Nothing goes out before the verdict, and then the answer up to the stop string."""
    engine.verifies = True
    engine.says("Hello STOP and more")
    asked = {"specprefill": True, "specprefill_verify": "wait", "stop": ["STOP"]}
    body = {"messages": [{"role": "user", "content": "Hi"}], **asked}
    answer = client_of(engine).post("/v1/chat/completions", json=body).json()
    assert (text_of(answer), answer["choices"][0]["finish_reason"]) == ("Hello ", "stop")
    assert answer["specprefill"]["verdict"] == "unknown"
