"""Models of no known family are read as their tokenizer's `response_template` says, in any pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mlx_specprefill_server.notations.formats import Format, detect

from ..fakes import byte_tokenizer
from .reading import TOOLS, Read, collected

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
SPEC = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "content": {"close": "<eot>"},
        "thinking": {"open": "<hm>", "close": "<ah>"},
        "tool_calls": {"open_pattern": r"<do (?P<name>\w+)>", "close": "<done>", "content": "json", "repeats": True,
                       "transform": CALL},
    },
}  # fmt: skip
ASKED = '<do get_weather>{"city": "Paris", "days": 3}<done>'


def format_of(spec: Any, template: str = "{{ messages }}") -> Format:
    tokenizer = byte_tokenizer(template, specials=())
    tokenizer._tokenizer.response_template = spec
    return detect(tokenizer)


def read(text: str, step: int, prompt: str = "", complete: bool = True) -> Read:
    parser = format_of(SPEC).parser(TOOLS, prompt)
    pieces = pairwise([*range(0, len(text), step), len(text)])
    return collected([delta for a, b in pieces for delta in parser.push(text[a:b])] + parser.finish(complete))


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_text_reasoning_and_calls(step: int) -> None:
    out = read(f"<hm>Where?<ah>I ask.{ASKED}{ASKED}", step)
    assert (out.reasoning, out.text) == ("Where?", "I ask.")
    assert out.calls == [("get_weather", '{"city": "Paris", "days": 3}')] * 2


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("body", ['{"city": ', "5", '["x"]'])
def test_what_is_no_call_is_text(step: int, body: str) -> None:
    out = read(f"I ask.<do get_weather>{body}<done>Done.", step)
    assert (out.calls, out.broken) == ([], [])
    assert out.text == f"I ask.<do get_weather>{body}<done>Done."
    assert "".join(out.text[said.start :][: len(said.text)] for said in out.said) == out.text


@pytest.mark.parametrize("step", [1, 1000])
def test_the_prompt_may_have_opened_the_reasoning(step: int) -> None:
    out = read("Where?<ah>There.", step, prompt="<bot><hm>")
    assert (out.reasoning, out.text) == ("Where?", "There.")


def test_a_family_that_is_known_and_a_template_that_is_not_come_first() -> None:
    assert format_of(SPEC).tools == "template"
    assert format_of(SPEC, "{{ messages }}<tool_call>").tools == "hermes"
    assert format_of({"version": 9}).tools is None
