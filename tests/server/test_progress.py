"""Progress of a long prefill. Every streaming dialect reports it unasked, in a form that its clients skip."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mlx_specprefill import Progress
from mlx_specprefill_server import report
from mlx_specprefill_server.report import ProgressReporter

from .canned_answers import named_events
from .fakes import FakeEngine

HI: Any = [{"role": "user", "content": "Hi"}]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
}
ALL = pytest.mark.parametrize("path", DIALECTS)
FIELDS = {"total", "cache", "processed", "time_ms", "stage"}


def steps(engine: FakeEngine, seconds: float) -> Any:
    """A prefill in ten steps, of which 20 tokens were cached."""

    def script(request: Any) -> Iterable[Any]:
        for done in range(10):
            time.sleep(seconds / 10)
            yield Progress("prefill", 10 * done, 100, 20)
        yield from engine.tokens("Hello")

    return script


def streamed(base: str, path: str, **more: Any) -> str:
    return httpx.post(base + path, json=DIALECTS[path] | {"stream": True} | more, timeout=60).text


def told(text: str) -> list[dict[str, Any]]:
    """Return the unrequested progress of a stream: comments, or fields of events that every client knows."""
    comments = [line.removeprefix(": progress ") for line in text.splitlines() if line.startswith(": progress ")]
    if comments or "event: " not in text:
        return [json.loads(comment) for comment in comments]
    events = [event for event in named_events(text) if "prompt_progress" in event]
    assert {event["type"] for event in events} <= {"ping", "response.in_progress"}
    return [event["prompt_progress"] for event in events]


@ALL
def test_a_long_prefill_is_told(live: Any, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PROGRESS_S", 0.075)
    engine.script = steps(engine, 0.5)
    base, _ = live()
    reports = told(streamed(base, path))
    assert 2 <= len(reports) <= 6
    assert all(set(report) == FIELDS for report in reports)
    assert {(report["total"], report["cache"], report["stage"]) for report in reports} == {(120, 20, "prefill")}
    processed = [report["processed"] for report in reports]
    assert processed == sorted(set(processed))


@ALL
def test_a_short_one_is_not(base: str, engine: FakeEngine, path: str) -> None:
    engine.script = steps(engine, 0.1)
    assert told(streamed(base, path)) == []


@ALL
def test_every_step_is_told_on_request(base: str, engine: FakeEngine, path: str) -> None:
    engine.script = steps(engine, 0.0)
    text = streamed(base, path, return_progress=True)
    assert text.count('"prompt_progress"') == 10
    assert ": progress" not in text


def test_the_sdks_skip_it(live: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "PROGRESS_S", 0.05)
    engine.script = steps(engine, 0.3)
    base, _ = live()
    with openai.OpenAI(base_url=f"{base}/v1", api_key="k", max_retries=0) as client:
        chunks = client.chat.completions.create(model="m", messages=HI, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello"
        pieces = client.completions.create(model="m", prompt="Hi", stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == "Hello"
        with client.responses.stream(model="m", input="Hi") as events:
            assert events.get_final_response().output_text == "Hello"
    with (
        anthropic.Anthropic(base_url=base, api_key="k", max_retries=0) as other,
        other.messages.stream(model="m", max_tokens=50, messages=HI) as stream,
    ):
        assert "".join(stream.text_stream) == "Hello"


def test_the_time_begins_with_the_prefill_and_not_in_the_queue() -> None:
    times = (60.0, 61.0, 62.5, 63.0, 64.4, 64.5)
    reporter = ProgressReporter(clock=iter((0.0, *times)).__next__)
    seen = []
    for done in range(0, 10 * len(times), 10):
        report = reporter.report(Progress("draft", done, 100, 0))
        seen.append(None if report is None else (report["processed"], report["time_ms"]))
    assert seen == [None, None, (20, 62_500), None, None, (50, 64_500)]


def test_nothing_is_told_before_the_share_of_the_cache_is_known() -> None:
    reporter = ProgressReporter(wanted=True)
    assert reporter.report(Progress("prefill", 5, 10)) is None
    report = reporter.report(Progress("prefill", 5, 10, 2))
    assert (report["processed"], report["total"]) == (7, 12)
