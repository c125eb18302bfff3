"""Whole conversations on templates that take less: every text, call and result is shown once and in order, or told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import Ending, conversation
from mlx_specprefill_server.prompt.forms import Form
from tests.support.examples import examples

from .fakes import byte_tokenizer
from .form_templates import FORMS

Turn = dict[str, Any]

MARK = re.compile(r"M[0-9]+M")
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "read"}},
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@cache
def builder(name: str) -> PromptBuilder:
    return PromptBuilder(byte_tokenizer(FORMS[name]))


def form(name: str, tools: bool = True) -> Form:
    return builder(name).forms[tools]


def build(name: str, messages: list[Turn], tools: Any = TOOLS, ending: Ending = "answer") -> Prompt:
    return asyncio.run(builder(name).chat(conversation(messages, tools, ending=ending)))


def text(name: str, messages: list[Turn], tools: Any = TOOLS, ending: Ending = "answer") -> str:
    return asyncio.run(builder(name).text(conversation(messages, tools, ending=ending)))


def user(content: Any) -> Turn:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> Turn:
    return {"role": "assistant", "content": content, **more}


def call(name: str, mark: str, function: str = "look") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": json.dumps({"at": mark})}}


def calls(content: Any, *asked: dict[str, Any], **more: Any) -> Turn:
    return answer(content, tool_calls=list(asked), **more)


def result(name: str, content: Any) -> Turn:
    return {"role": "tool", "tool_call_id": name, "content": content}


# --- the property -----------------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation, and its marks in the order in which they should be read, calls one by one or all at once."""

    messages: list[Turn] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    one_by_one: list[str] = field(default_factory=list)
    systems: list[str] = field(default_factory=list)
    images: int = 0
    count: int = 0

    def mark(self) -> str:
        self.count += 1
        return f"M{self.count}M"

    def says(self, mark: str) -> str:
        self.together.append(mark)
        self.one_by_one.append(mark)
        return mark


def add_round(talk: Talk, draw: Any) -> None:
    """Add a message with calls and its results, permuted, and some of them missing."""
    content = talk.says(talk.mark()) if draw(st.booleans()) else draw(st.sampled_from(["", None]))
    number = draw(st.integers(1, 3))
    prefix = draw(st.sampled_from(["", "call_", "toolu_01A09q90qw90lq917835lq9_"]))
    ids = [f"{prefix}{talk.count}_{i}" for i in range(number)]
    asked = [talk.mark() for _ in ids]
    answered = [talk.mark() if draw(st.booleans()) else None for _ in ids]
    thought = {"reasoning_content": "Hm."} if draw(st.booleans()) else {}
    functions = [draw(st.sampled_from(["look", "read"])) for _ in ids]
    talk.messages.append(calls(content, *map(call, ids, asked, functions), **thought))
    talk.messages += [result(*pair) for pair in draw(st.permutations(list(zip(ids, answered, strict=True)))) if pair[1]]
    talk.together += [*asked, *filter(None, answered)]
    talk.one_by_one += [mark for pair in zip(asked, answered, strict=True) for mark in pair if mark]


def add_turn(talk: Talk, draw: Any) -> None:
    match draw(st.sampled_from(["user", "answer", "nothing", "image", "system", "orphan", "round", "round"])):
        case "user":
            talk.messages.append(user(talk.says(talk.mark())))
        case "answer":
            talk.messages.append(answer(talk.says(talk.mark())))
        case "nothing":
            talk.messages.append(answer(draw(st.sampled_from(["", None]))))
        case "image":
            talk.messages.append(user([{"type": "text", "text": talk.says(talk.mark())}, IMAGE]))
            talk.images += 1
        case "system":
            talk.systems.append(talk.mark())
            talk.messages.append({"role": draw(st.sampled_from(["system", "developer"])), "content": talk.systems[-1]})
        case "orphan":  # behind words, where it can't be the result of a call
            talk.messages += [user(talk.says(talk.mark())), result("lost", talk.says(talk.mark()))]
        case "round":
            add_round(talk, draw)


@st.composite
def talks(draw: Any) -> Talk:
    talk = Talk()
    for _ in range(draw(st.integers(1, 7))):
        add_turn(talk, draw)
    return talk


@pytest.mark.extended
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=examples(15), deadline=None)
@given(talk=talks(), has_tools=st.booleans())
def test_every_mark_is_shown_once_and_in_order(name: str, talk: Talk, has_tools: bool) -> None:
    prompt = build(name, talk.messages, TOOLS if has_tools else [])
    shown = MARK.findall(byte_tokenizer().decode(list(prompt.tokens)))
    together = form(name, has_tools).parallel or form(name, has_tools).calls == "written"
    wanted = talk.together if together else talk.one_by_one
    assert [mark for mark in shown if mark not in talk.systems] == wanted
    assert sorted(mark for mark in shown if mark in talk.systems) == sorted(talk.systems)
    is_written = form(name, has_tools).calls == "written" and any("tool_calls" in m for m in talk.messages)
    assert len(prompt.left_out) == min(talk.images, 8) + is_written


def marks_of(content: Any) -> list[str]:
    return MARK.findall(json.dumps(content))


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=examples(8), deadline=None)
@given(talk=talks())
def test_every_text_lies_in_a_span_of_its_role(name: str, talk: Talk) -> None:
    """Sparse prefill knows by the spans what it may drop."""
    prompt = build(name, talk.messages)
    kinds: dict[Any, Any] = {}
    for span in prompt.spans:
        content = byte_tokenizer().decode(list(prompt.tokens[span.content_start : span.content_end]))
        kinds |= dict.fromkeys(MARK.findall(content), span.kind)
    for message in talk.messages:
        if message["role"] in ("user", "tool") or (message["role"] == "assistant" and "tool_calls" not in message):
            found = {kinds.get(mark) for mark in marks_of(message["content"])} - {message["role"]}
            assert not found


# --- what is asked, and what is learnt --------------------------------------------------------------------------------

# Templates that show no calls, and the notation in which these are written as text.
WRITTEN = {
    "no calls": "",
    "no calls, trained on tags": "hermes",
    "no calls, trained on Python": "lfm2",
    "no calls, trained on a list": "granite",
    "no calls, no results": "",
    "no system, all alternate": "",
}
HIDE_TOOLS = {"no calls, no results", "no system, all alternate"}
ONE_BY_ONE = {"one call at a time", "the first call", "one channel for text and reasoning", "the last call's name"}


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_written_or_taken_apart_only_where_a_template_does_not_show_them(name: str) -> None:
    assert (form(name).calls == "written") is (name in WRITTEN)
    assert form(name).shows_tools is (name not in HIDE_TOOLS)
    assert form(name).notation == WRITTEN.get(name, "")
    assert form(name).parallel is (name not in ONE_BY_ONE)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_is_asked_a_bounded_number_of_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(FORMS[name])
    asked = []
    render = tokenizer._tokenizer.apply_chat_template
    tokenizer._tokenizer.apply_chat_template = lambda *args, **kwargs: (asked.append(1), render(*args, **kwargs))[1]
    PromptBuilder(tokenizer)
    assert 0 < len(asked) <= 200


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_system_message_alone_is_shown(name: str, has_tools: bool) -> None:
    assert "M1M" in text(name, [{"role": "system", "content": "M1M"}], TOOLS if has_tools else [])


# --- the beginning stays ----------------------------------------------------------------------------------------------

# The requests of a tool loop, each with what the model then wrote and the tools returned.
LOOP = [
    [{"role": "system", "content": "Rules."}, user("Look at both.")],
    [calls("I look.", call("call_1", "a"), call("call_2", "b"), reasoning_content="Two."), result("call_2", "B")],
    [result("call_1", "A"), user("Mind the tests.")],
    [calls(None, call("call_3", "c", "read"), reasoning_content="One."), result("call_3", "C")],
    [user("Stop there.")],
    [answer("All is well."), user("Thanks. Once more?")],
    [calls("Again.", call("call_4", "d")), result("call_4", "D")],
]
# Requests whose beginning differs from the one before, and the reason.
BREAKS = {
    "no system, all alternate": {3: "a user's text is put behind the results"},
    "no empty answer": {3: "a user's text is put into the result"},
    "one channel for text and reasoning": {4: "the template drops the analysis when the answer is final"},
}


def requests() -> Iterator[list[Turn]]:
    messages: list[Turn] = []
    for number, turns in enumerate(LOOP):
        messages = messages + turns
        if number != 1:  # the second result comes with the next turn
            yield messages


@pytest.mark.parametrize("name", FORMS)
def test_a_longer_conversation_begins_with_the_shorter_one(name: str) -> None:
    rendered = [text(name, messages, ending="none") for messages in requests()]
    pairs = enumerate(pairwise(rendered), 1)
    broken = {number for number, (shorter, longer) in pairs if not longer.startswith(shorter)}
    assert broken == set(BREAKS.get(name, {}))
