"""Reminders of clients: each stands beside what it belongs to, and never asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from mlx_specprefill import GenerationRequest
from mlx_specprefill.config import ScoringConfig, SelectionConfig
from mlx_specprefill.selection.plan import forced_ranges
from mlx_specprefill.selection.question_lines import repeated_question_spans
from mlx_specprefill_server.prompt.conversation import Message
from mlx_specprefill_server.prompt.reminders import only_reminds, place_reminders, without_reminders

from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS
from .test_history import CHAT, MESSAGES, RESPONSES, ask, prompt

LETTERS = {"s": "system", "d": "developer", "u": "user", "r": "user", "a": "assistant", "t": "tool"}
QUESTION, COMMAND = "Which error code does the log show?", "cat app.log"
LOG = "\n".join(f"line {i} of the log says nothing" for i in range(40))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"]), context_length=1 << 16))
    yield fake
    fake.close()


def tagged(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def messages(short: str) -> list[Message]:
    """ "s1 u2" as messages; r is a user's message of reminders alone."""
    made = [{"role": LETTERS[word[0]], "content": word} for word in short.split()]
    return [m | {"content": tagged(m["content"])} if m["content"].startswith("r") else m for m in made]


def shown(given: list[Message]) -> str:
    """The other way round, with R(...) for a reminder."""
    words = [f"{message['role'][0]}:{message['content']}" for message in given]
    text = " ".join(words).replace("\n\n</", "\n</")
    return text.replace("<system-reminder>\n", "R(").replace("\n</system-reminder>", ")").replace("\n\n", "+")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s1 u2 a3 u4", "s:s1 u:u2 a:a3 u:u4"),
        ("s1 d2 u3", "s:s1 d:d2 u:u3"),
        ("u1 s2", "u:R(s2)+u1"),
        ("u1 s2 d3 a4", "u:R(s2+d3)+u1 a:a4"),
        ("u1 a2 s3 u4", "u:u1 a:a2 u:R(s3)+u4"),
        ("u1 a2 t3 s4", "u:u1 a:a2 t:t3+R(s4)"),
        ("u1 a2 t3 s4 a5 u6", "u:u1 a:a2 t:t3+R(s4) a:a5 u:u6"),
        ("u1 a2 t3 s4 u5", "u:u1 a:a2 t:t3+R(s4) u:u5"),
        ("u1 a2 t3 r4 s5 d6 r7", "u:u1 a:a2 t:t3+R(r4)+R(s5+d6)+R(r7)"),
        ("u1 a2 s3 a4", "u:u1 a:a2 u:R(s3) a:a4"),
        ("s1 r2 u3", "s:s1 u:R(r2)+u3"),
        ("r1 a2", "u:R(r1) a:a2"),
        ("s1", "s:s1"),
        ("", ""),
    ],
)
def test_reminders_stand_beside_what_they_follow(given: str, expected: str) -> None:
    assert shown(place_reminders(messages(given))) == expected


def test_a_later_reminder_leaves_the_beginning_as_it_was() -> None:
    turns = "s1 u2 a3 u4 s5 a6 t7 s8 a9 t10 r11 a12 s13 a14 u15".split()
    whole = place_reminders(messages(" ".join(turns)))
    for length in (3, 6, 9, 12, 14):  # whenever the assistant has answered
        part = place_reminders(messages(" ".join(turns[:length])))
        assert whole[: len(part)] == part


def test_an_empty_one_leaves_no_tags() -> None:
    given = messages("u1 a2 t3")
    assert place_reminders([*given, {"role": "system", "content": ""}]) == given


def test_tags_in_a_system_message_become_one_pair() -> None:
    nested = {"role": "system", "content": f"The hook says {tagged('stop')} at last."}
    (made,) = place_reminders([*messages("a1"), nested])[1:]
    assert only_reminds(made)
    assert made["content"].count("<system-reminder>") == 1


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("no tag", "no tag"),
        (tagged("x"), ""),
        (f"a{tagged('x')}b{tagged('y')}c", "abc"),
        ("what is <system-reminder>?", "what is <system-reminder>?"),
        (f"{tagged('x')} and </system-reminder>", " and </system-reminder>"),
        (tagged('if "<system-reminder>" in text: pass'), ""),
        (tagged('OPEN, CLOSE = "<system-reminder>", "</system-reminder>"'), ""),
        ("a" + tagged('if "<system-reminder>" in text') + "b" + tagged("y") + "c", "abc"),
        (f"a{tagged(tagged('x') + tagged('y'))}b", "ab"),
        ("<system-reminder>" * 50_000, "<system-reminder>" * 50_000),  # in linear time
        ("<system-reminder><system-reminder></system-reminder>" * 50_000, ""),
    ],
)
def test_the_text_without_reminders(text: str, left: str) -> None:
    assert without_reminders(text) == left
    assert only_reminds({"role": "user", "content": text}) == (not left)


# --- Recorded shapes: ten rounds, each with a reminder that changes ---------------------------------------------------


def claude(rounds: int, turn: Callable[[int], list[dict[str, Any]]]) -> tuple[str, dict[str, Any]]:
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    for i in range(rounds):
        call = {"type": "tool_use", "id": f"c{i}", "name": "Bash", "input": {"command": COMMAND}}
        talk += [{"role": "assistant", "content": [call]}, *turn(i)]
    return MESSAGES, {"max_tokens": 9, "messages": talk}


def claude_result(i: int) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{i}", "content": LOG}


def claude_by_role(rounds: int) -> tuple[str, dict[str, Any]]:
    """Claude Code 2.1.330 with a model name that it doesn't know."""

    def turn(i: int) -> list[dict[str, Any]]:
        countdown = f"<total_tokens>{14998980 - 977 * i} tokens left</total_tokens>"
        return [{"role": "user", "content": [claude_result(i)]}, {"role": "system", "content": countdown}]

    return claude(rounds, turn)


def claude_by_tags(rounds: int) -> tuple[str, dict[str, Any]]:
    """The same beside a result: its list of things to do, and a changed file."""

    def turn(i: int) -> list[dict[str, Any]]:
        texts = [tagged(f"Your todo list has changed: {i} left."), tagged("app.log was modified by the user.")]
        blocks = [claude_result(i), *({"type": "text", "text": text} for text in texts)]
        return [{"role": "user", "content": blocks}]

    return claude(rounds, turn)


def chat(rounds: int, role: str, text: str) -> tuple[str, dict[str, Any]]:
    talk: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}]
    for i in range(rounds):
        function = {"name": "bash", "arguments": json.dumps({"command": COMMAND})}
        call = {"id": f"c{i}", "type": "function", "function": function}
        talk += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{i}", "content": LOG},
            {"role": role, "content": text.format(i)},
        ]
    return CHAT, {"messages": talk}


def opencode(rounds: int) -> tuple[str, dict[str, Any]]:
    return chat(rounds, "user", tagged("Your operational mode has changed from plan to build, step {}."))


def hermes(rounds: int) -> tuple[str, dict[str, Any]]:
    return chat(rounds, "system", "[Iteration {} of 90: begin to consolidate what you know.]")


def codex(rounds: int) -> tuple[str, dict[str, Any]]:
    items: list[Any] = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for i in range(rounds):
        arguments = json.dumps({"command": COMMAND})
        note = [{"type": "input_text", "text": f"<permissions>{i} approvals are left</permissions>"}]
        items += [
            {"type": "function_call", "call_id": f"c{i}", "name": "shell", "arguments": arguments},
            {"type": "function_call_output", "call_id": f"c{i}", "output": LOG},
            {"type": "message", "role": "developer", "content": note},
        ]
    return RESPONSES, {"instructions": "Be kind.", "input": items}


def asking(engine: FakeEngine, request: GenerationRequest) -> str:
    """The text of the lines that ask, of a prompt that ends with a result."""
    pieces = [engine.pair.tokenizer.decode([token]) for token in request.prompt.tolist()]
    ends = np.flatnonzero([piece in ("\n", ".", "?") for piece in pieces]).astype(np.int32) + 1
    ranges = repeated_question_spans(request.spans, ScoringConfig(question_rows=(8, 99)), ends)
    return "".join(engine.pair.tokenizer.decode(request.prompt[start:end].tolist()) for start, end in ranges)


@pytest.mark.parametrize("agent", [claude_by_role, claude_by_tags, opencode, hermes, codex])
def test_the_users_line_and_the_call_ask_and_the_prompt_only_grows(
    client: TestClient, engine: FakeEngine, agent: Callable[[int], tuple[str, dict[str, Any]]]
) -> None:
    before = ""
    for rounds in range(1, 11):
        ask(client, *agent(rounds))
        request, text = engine.requests[-1], prompt(engine)
        opened = text.rindex("<|im_start|>assistant")
        assert text.startswith(before)
        before = text[:opened]
        asked = asking(engine, request)
        assert QUESTION in asked
        assert COMMAND in asked
        assert "reminder" not in asked
        assert [span.kind for span in request.spans].count("user") == 1
        reasons = {r.reason for r in forced_ranges(request.spans, len(request.prompt), SelectionConfig())}
        assert {"last user message", "tool result: head", "tool result: tail"} <= reasons
        assert "system-reminder" in text
        assert request.about_everything is None


def test_a_reminder_alone_is_not_the_users(client: TestClient, engine: FakeEngine) -> None:
    """Between two answers it has no text beside it; words in it ask for nothing."""
    talk = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "It is being read."},
        {"role": "system", "content": "Summarize all of it when you are done."},
    ]
    ask(client, CHAT, {"messages": talk})
    request = engine.requests[-1]
    assert [span.kind for span in request.spans] == ["user", "assistant", "other"]
    assert request.about_everything is None


F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
KNOWN: list[Any] = [
    {"type": "additional_tools", "role": "developer", "tools": tools} for tools in ([F], [F, F | {"name": "g"}])
]


@pytest.mark.parametrize("again", [KNOWN[:1], KNOWN[1:]])
def test_a_sentence_about_known_tools_is_not_the_users(
    client: TestClient, engine: FakeEngine, again: list[dict[str, Any]]
) -> None:
    ask(client, RESPONSES, {"tools": [F], "input": [{"role": "user", "content": QUESTION}, *again]})
    request = engine.requests[-1]
    [span] = [span for span in request.spans if span.kind == "user"]
    assert QUESTION in engine.pair.tokenizer.decode(list(request.prompt[span.start : span.end]))
    assert "already: f" in prompt(engine)


@pytest.mark.parametrize("role", ["user", "system", "additional_tools"])
def test_a_request_for_a_summary_is_answered_once(client: TestClient, engine: FakeEngine, role: str) -> None:
    summary: list[Any] = [{"role": "user", "content": "Write a summary of this conversation so far."}]
    answered = [*summary, {"role": "assistant", "content": "Here it is."}]
    behind = KNOWN[:1] if role == "additional_tools" else [{"role": role, "content": tagged("Five tokens are left.")}]
    for talk in ([*answered, *behind], [*answered, *summary]):
        ask(client, RESPONSES, {"tools": [F], "input": talk})
    assert [request.about_session for request in engine.requests] == [False, True]
