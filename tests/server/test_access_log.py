"""One line per request, with what it cost and nothing of what was said."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from mlx_specprefill import GenerationRequest, Timings
from mlx_specprefill.prefill_report import Reached
from mlx_specprefill_server.monitoring.logs import configure_logging
from tests.support.waiting import eventually

from . import fakes
from .conftest import client_of
from .fakes import FakeEngine, says_and_waits

SECRET = "a-very-secret-prompt"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "specprefill": True}


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.fixture
def root_logger() -> Iterator[None]:
    """Puts the process's own logging back."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.name.endswith("access_log")]  # type: ignore[attr-defined]


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Without the lines of the client, which runs in this process too."""
    return [line for line in capsys.readouterr().err.splitlines() if "httpx" not in line]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(client: TestClient, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    answer = client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    (line,) = lines(caplog)
    assert line.pop("ms") > 0
    prompt = line.pop("prompt_tokens")
    assert line == {
        "request_id": answer.headers["x-request-id"],
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "queue_ms": 0.0,
        "ttft_ms": 7.0,
        "draft_ms": 1.0,
        "select_ms": 2.0,
        "prefill_ms": 3.0,
        "decode_ms": 4.0,
        "cached_tokens": 1,
        "kept_tokens": prompt // 2,
        "completion_tokens": 6,
        "mode": "sparse",
        "reason": "asked for",
        "finish": "stop",
    }


def test_answers_of_one_request_are_summed(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.post("/v1/completions", json={"prompt": ["a", "bc"]})
    (line,) = lines(caplog)
    assert line["completion_tokens"] == 12
    assert line["prompt_tokens"] == 3


def test_several_answers_to_one_prompt_count_it_once(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.post("/v1/completions", json={"prompt": "abc", "n": 3})
    (line,) = lines(caplog)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (3, 18)


def test_a_refused_request_has_its_line(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.post("/v1/chat/completions", json={"messages": 1})
    client.get("/nowhere")
    assert [(line["status"], line["path"]) for line in lines(caplog)] == [
        (400, "/v1/chat/completions"),
        (404, "/nowhere"),
    ]


def test_a_refusal_at_the_gate_has_its_line(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    answer = client_of(engine, api_keys=("right",)).get("/v1/models")
    assert lines(caplog)[0]["status"] == 401
    assert answer.headers["x-request-id"] == lines(caplog)[0]["request_id"]


def test_the_line_of_a_client_that_left_knows_the_cost(
    engine: FakeEngine, live: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    base, _ = live()
    said = says_and_waits(engine, "Hello")
    with httpx.stream("POST", f"{base}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=60) as answer:
        stream = answer.iter_lines()  # held: a dropped iterator closes the connection
        next(stream)
        assert said.wait(60)
    assert engine.idle()
    assert eventually(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert (line["finish"], line["completion_tokens"], line["mode"]) == ("abort", 5, "sparse")


def test_the_time_to_the_first_token_is_the_one_of_the_report(
    client: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue has its own field, here as there."""
    plain, times = fakes.report_of, Timings(queue_ms=5_000, prefill_ms=30, ttft_ms=40, decode_ms=4)
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), timings=times))
    shown = client.post("/v1/chat/completions", json=CHAT).json()["specprefill"]["timings"]
    (line,) = lines(caplog)
    assert {name: line[name] for name in shown} == shown


def test_the_line_of_a_request_that_was_given_up_says_how_far_it_came(
    engine: FakeEngine,
    live: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, begun = fakes.report_of, threading.Event()
    given_up = {"timings": Timings(queue_ms=3, draft_ms=900), "kept_tokens": 0, "reached": Reached("draft", 512)}
    monkeypatch.setattr(fakes, "report_of", lambda request: replace(plain(request), **given_up))

    def script(request: GenerationRequest) -> Iterator[Any]:
        begun.set()
        yield threading.Event()

    engine.script = script
    base, _ = live()
    with closing(HTTPConnection(base.removeprefix("http://"), timeout=60)) as connection:
        body = json.dumps(CHAT)
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert begun.wait(60)
    assert eventually(lambda: bool(lines(caplog)))
    (line,) = lines(caplog)
    assert (line["status"], line["finish"]) == (499, "abort")
    assert (line["stage"], line["stage_tokens"], line["kept_tokens"], line["draft_ms"]) == ("draft", 512, 0, 900)
    assert "ttft_ms" not in line


def test_files_of_the_page_are_quiet_unless_they_are_missing(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    client.get("/web/app.js")
    client.get("/web/nothing.js")
    levels = [record.levelname for record in caplog.records if record.name.endswith("access_log")]
    assert levels == ["DEBUG", "INFO"]


def test_health_checks_are_quiet(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    client.get("/health")
    client.get("/metrics")
    assert {record.levelname for record in caplog.records if record.name.endswith("access_log")} == {"DEBUG"}


def test_prompts_and_answers_are_never_logged(
    engine: FakeEngine, client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine.says("the-secret-answer")
    client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json={**CHAT, "temperature": SECRET})
    client.post("/v1/completions", json={"prompt": SECRET, "stop": [SECRET]})
    client.post("/tokenize", json={"content": SECRET})
    client.post(f"/v1/chat/completions?q={SECRET}", json=CHAT)
    own = [record for record in caplog.records if not record.name.startswith("httpx")]  # the client of this test logs
    assert own
    assert not any("secret" in str(vars(record)) for record in own)


def test_the_request_id_comes_back(client: TestClient) -> None:
    assert client.get("/version", headers={"x-request-id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"


@pytest.mark.parametrize("given", ["", "x" * 129, "with space", 'quote"', "ümlaut".encode()])
def test_an_odd_request_id_is_replaced(client: TestClient, given: Any) -> None:
    assert client.get("/version", headers={"x-request-id": given}).headers["x-request-id"].startswith("req_")


def test_a_failure_of_the_server_has_id_and_line(
    engine: FakeEngine, client: TestClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "stats", lambda: 1 / 0)
    answer = client.get("/v1/specprefill/stats")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert lines(caplog)[0] | {"ms": 0} == {
        "request_id": answer.headers["x-request-id"],
        "method": "GET",
        "path": "/v1/specprefill/stats",
        "status": 500,
        "ms": 0,
    }


@pytest.mark.usefixtures("root_logger")
def test_json_lines(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    client.get("/a%0Ab%22c")
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("somewhere").exception("it broke")
    access, broken = (json.loads(line) for line in written(capsys))
    assert access["path"] == "/a%0Ab%22c"
    assert access["status"] == 404
    assert access["level"] == "info"
    assert access["time"].endswith("+00:00")
    assert broken["message"] == "it broke"
    assert broken["exception"].endswith("ValueError: x")


@pytest.mark.usefixtures("root_logger")
def test_text_lines(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info")
    client.post("/v1/chat/completions", json=CHAT)
    client.get("/x%0Ay")
    chat, unknown = written(capsys)
    assert "POST /v1/chat/completions 200 request_id=req_" in chat
    assert ' mode=sparse reason="asked for" finish=stop' in chat
    assert "GET /x%0Ay 404 " in unknown


@pytest.mark.usefixtures("root_logger")
def test_the_level_is_kept(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning")
    client.get("/version")
    logging.getLogger("library").info("quiet")
    logging.getLogger("library").warning("loud")
    assert [line.split(": ")[1] for line in written(capsys)] == ["loud"]
