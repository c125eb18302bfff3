"""Text inserted into what a server has read costs what is new, in every dialect, with all that shapes answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.serving import Server

from .conftest import filler

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
BY_PATH: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
}
CHAT, *OTHERS = BY_PATH
SHAPED: dict[str, dict[str, Any]] = {
    "a format": {"response_format": FORMAT, "max_tokens": 24},
    "several": {"n": 2, "logprobs": True, "top_logprobs": 2, "temperature": 1},
    "a stop": {"stop": ["e"], "frequency_penalty": 0.5},
}
CASES = [*((CHAT, fields) for fields in SHAPED.values()), *((path, {}) for path in OTHERS)]
pytestmark = pytest.mark.extended


def edited(server: Server, path: str, seed: int) -> dict[str, Any]:
    """Return the body of a request whose prompt inserts a line into one that the server has just read in full."""
    lines = filler(1300, seed)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"

    def body(*late: str) -> dict[str, Any]:
        text = "\n".join([*lines[:20], *late, *lines[20:], "\nWhat did the gardener do?"])
        return {"model": "target", limit: 4} | BY_PATH[path](text)

    read = httpx.post(server.base + path, json=body() | {"specprefill": False}, timeout=120)
    assert read.status_code == 200, read.text
    return body("A late note: the gardener is away.")


@pytest.mark.parametrize(("path", "fields"), CASES, ids=[*SHAPED, *OTHERS])
def test_an_edit_costs_what_is_new(server: Server, path: str, fields: dict[str, Any]) -> None:
    body = edited(server, path, len(path) + 100 * len(str(fields)))
    answer = httpx.post(server.base + path, json=body | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    report = said["specprefill"]
    assert report["mode"] == "reuse"
    assert report["read_tokens"] == report["prompt_tokens"] - report["cached_tokens"] < report["prompt_tokens"] / 2
    assert "warnings" not in said
    if fields.get("n"):
        assert [len(choice["logprobs"]["content"]) for choice in said["choices"]] == [4, 4]
    if "response_format" in fields:
        assert json.loads(said["choices"][0]["message"]["content"])["a"] in ("x", "y")
    metrics = httpx.get(f"{server.base}/metrics", timeout=60).text
    assert 'specprefill_requests_total{mode="reuse"' in metrics


@pytest.mark.parametrize("place", [0, 10, 30])
@pytest.mark.parametrize(("was", "now"), [("471128", "902653"), ("662041", "662047")])
def test_a_changed_fact_is_told(server: Server, was: str, now: str, place: int) -> None:
    lines = filler(1300, place)

    def ask(code: str, **fields: bool) -> dict[str, Any]:
        text = " ".join([*lines[:place], f"The secret code for Clara is {code}.", *lines[place:]])
        message = {"role": "user", "content": f"{text}\n\nWhat is the secret code for Clara?"}
        body = {"model": "target", "messages": [message], "max_tokens": 24, "temperature": 0}
        body |= {"cache_salt": "ours"} | fields
        answer = httpx.post(server.base + CHAT, json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert was in ask(was, specprefill=False)["choices"][0]["message"]["content"]
    said = ask(now)
    assert said["specprefill"]["mode"] == "reuse"
    assert now in said["choices"][0]["message"]["content"]


def test_a_stream_tells_of_an_edits_progress_and_report(server: Server) -> None:
    body = edited(server, CHAT, 77) | {
        "stream": True,
        "return_progress": True,
        "stream_options": {"include_usage": True},
    }
    with httpx.stream("POST", server.base + CHAT, json=body, timeout=120) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    steps = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    report = chunks[-1]["specprefill"]
    assert report["mode"] == "reuse"
    reading = {(step["total"], step["cache"]) for step in steps if step["stage"] == "prefill"}
    assert reading == {(report["prompt_tokens"], report["cached_tokens"])}
    assert steps[-1]["processed"] == report["prompt_tokens"]


def test_a_lost_reminder_costs_a_part(server: Server) -> None:
    """As of a sub-agent that is resumed: the text behind the reminder is what was read."""
    text = " ".join(filler(1300, 77)) + " The secret code for Clara is 471128. " + " ".join(filler(300, 78))
    reminder = "<system-reminder>\nThe task list is empty. Say nothing about it.\n</system-reminder>\n\n"

    def ask(front: str, **fields: bool) -> dict[str, Any]:
        message = {"role": "user", "content": f"{front}{text}\n\nWhat is the secret code for Clara?"}
        body = {"model": "target", "messages": [message], "max_tokens": 24, "temperature": 0, "cache_salt": "sub"}
        answer = httpx.post(server.base + CHAT, json=body | fields, timeout=120)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    ask(reminder, specprefill=False)
    said = ask("")
    report = said["specprefill"]
    assert report["cache"]["miss"]["kind"] in ("edited", "template")
    assert report["mode"] == "reuse"
    assert report["read_tokens"] < report["prompt_tokens"] / 2
    assert "471128" in said["choices"][0]["message"]["content"]
