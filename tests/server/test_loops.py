"""Answers that repeat themselves end; code, tables, white space and base64 never do."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.generation.loops import EVERY, LoopGuard

from .calling import called
from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PERIOD = "so it goes and so "  # a byte is a token
FENCE = "```python\n"
TOOL = {"type": "function", "function": {"name": "edit"}}


def caught(text: str) -> int | None:
    """Return after how many tokens the guard ends a text."""
    tokenizer = byte_tokenizer()
    guard = LoopGuard(tokenizer.decode)
    for count, token in enumerate(tokenizer.encode(text, add_special_tokens=False), 1):
        if guard.push(token):
            return count
    return None


@pytest.mark.parametrize(
    "period",
    [
        "for ",
        PERIOD,
        "I am sorry.\n",
        "\u7684",
        "x" * 30 + " word " + "y" * 27,
        "Now I run `ls | grep x` and look. ",
        "## Step\n\n**Note:** I see.\n",
    ],
)
def test_a_loop_is_ended_soon(period: str) -> None:
    length = max(64, 8 * len(period.encode()))
    count = caught("It begins. " + period * 200)
    assert count is not None
    assert length <= count <= length + 11 + 2 * len(period.encode()) + 16


def test_eight_times_are_a_loop() -> None:
    assert len(PERIOD) * 8 % EVERY == 0  # it is looked for there
    assert caught(PERIOD * 8) == len(PERIOD) * 8


@pytest.mark.parametrize("text", [PERIOD * 7, "for " * 15, "ab" * 400, ("word " * 12 + "x") * 7])
def test_less_is_no_loop(text: str) -> None:
    assert caught(text) is None


GENERATOR = random.Random(0)
HARMLESS = {
    "zeros in base64": base64.b64encode(bytes(3000)).decode(),
    "base64": base64.b64encode(GENERATOR.randbytes(3000)).decode(),
    "spaces": " " * 2000,
    "lines": "\n" * 2000,
    "a table": "| no | no |\n" * 200,
    "a rule of a table": "|---|---|\n" + "| a | b |\n" * 100,
    "tabs": "0\tno\n" * 200,
    "numbers": "[" + "0, " * 500,
    "hex": "0x00, " * 400,
    "lines of base64": ("A" * 60 + "+/\n") * 100,
    "ones in base64": base64.b64encode(b"\xff" * 3000).decode(),
    "a table without edges": "no | no\n" * 200,
    "values between commas": "no,no,,no\n" * 200,
    "values with spaces": "no, yes, no\n" * 200,
    "a table of HTML": "<tr><td>no</td></tr>\n" * 200,
    "a table of LaTeX": "no & no \\\\\n" * 200,
    "a line": "-" * 1000,
    "code": FENCE + "    pass\n" * 50 + "```",
    "a file": FENCE + Path(__file__).read_text(),
    "code with another fence": "~~~\n" + "pass\n" * 50,
    "code without a fence": "    pass\n" * 50,
    "statements": "INSERT INTO t VALUES (NULL);\n" * 20,
    "marks": "<li>Item</li>\n" * 40,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_repeats_for_good_reasons_goes_on(name: str) -> None:
    assert caught(HARMLESS[name]) is None


@pytest.mark.parametrize("period", ["    do_it_again()\n", "!", "\N{ROCKET}", '{"a": "b"} '])
def test_a_loop_in_code_or_of_signs_is_ended_later(period: str) -> None:
    for fence in ("", FENCE):
        count = caught(fence + period * 1000)
        assert count is not None
        assert count >= 8 * max(64, 8 * len(period.encode()))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(), 16_384))
    fake.says(PERIOD * 100)
    yield fake
    fake.close()


def ask(client: TestClient, **body: Any) -> Any:
    answer = client.post(CHAT, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_answer_says_why(engine: FakeEngine) -> None:
    body = ask(client_of(engine))
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"]) < 200
    assert body["specprefill"]["ended"].startswith("loop: the same 18 tokens")
    assert body["warnings"] == [body["specprefill"]["ended"]]


def test_a_call_is_code(engine: FakeEngine) -> None:
    for times, ended in ((40, False), (200, True)):
        engine.says(called("edit", text="x is y\n" * times))
        body = ask(client_of(engine), tools=[TOOL])
        assert ("ended" in body["specprefill"]) == ended


@pytest.mark.parametrize("given", ["on", None])
def test_raw_completions_are_guarded_on_demand(engine: FakeEngine, given: str | None) -> None:
    answer = client_of(engine).post("/v1/completions", json={"prompt": "Hi", "max_tokens": 500, "loop_guard": given})
    assert ("ended" in answer.json()["specprefill"]) == (given == "on")


@pytest.mark.parametrize(
    "fields",
    [
        {"loop_guard": "off"},
        {"response_format": {"type": "json_object"}},
        {"ignore_eos": True},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_what_is_not_guarded(engine: FakeEngine, fields: Any) -> None:
    assert "ended" not in ask(client_of(engine), **fields)["specprefill"]
