"""Generated sessions of agents: their sizes, and that what they ask for was said before."""

from __future__ import annotations

import json
import random

import pytest
from benchmarks.harness.agent_sessions import KINDS, TEMPLATE, Session, make_session, result
from jinja2 import Environment

TOKENS = 6000


def count(text: str) -> int:
    return (len(text) + 3) // 4


def grown(session: Session) -> int:
    """Tokens of everything that is said in it."""
    calls = sum(count(json.dumps(step.call)) for step in session.steps if step.call)
    return session.opening + calls + sum(count(step.said) for step in session.steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_fact_that_is_asked_for_was_said_and_not_answered_before(kind: str) -> None:
    session = make_session(KINDS[kind], TOKENS, 1, count)
    said = ""
    for step in (*session.steps, *session.after):
        said = "" if step.fresh else said
        if step.code:
            name = step.said.removeprefix("What is the secret code for ").removesuffix("?")
            assert said.count(f"The secret code for {name} is {step.code}.") == 1
        said += step.said
    assert sum(bool(step.code) for step in session.steps) >= 1
    assert session.after


def test_a_session_has_fifteen_turns_and_the_size_that_was_wanted() -> None:
    session = make_session(KINDS["growth"], TOKENS, 1, count)
    assert len(session.steps) == 15
    assert 0.9 * TOKENS < grown(session) < 1.15 * TOKENS
    assert 0.2 * TOKENS < session.opening < 0.3 * TOKENS


def test_the_same_seed_gives_the_same_session_and_another_one_another() -> None:
    shape = KINDS["growth"]
    assert make_session(shape, TOKENS, 1, count) == make_session(shape, TOKENS, 1, count)
    assert make_session(shape, TOKENS, 1, count).system != make_session(shape, TOKENS, 2, count).system


def test_another_session_in_the_same_repository_begins_alike() -> None:
    first, second = (make_session(KINDS["growth"], TOKENS, seed, count) for seed in (1, 2))
    later = first.again(second)
    assert (later.system, later.tools, later.opening) == (first.system, first.tools, first.opening)
    assert later.steps == second.steps


def test_a_compaction_forgets_what_was_read() -> None:
    session = make_session(KINDS["compaction"], TOKENS, 1, count)
    assert [step.fresh for step in session.steps].count(True) == 1


@pytest.mark.parametrize("kind", ["read", "search", "edit", "test"])
def test_results_are_as_long_as_wanted_and_carry_their_fact_in_one_line(kind: str) -> None:
    text = result(kind, random.Random(1), 800, count, "The secret code for Anna is 471128.")
    assert 700 < count(text) < 900
    (line,) = (line for line in text.splitlines() if "471128" in line)
    assert "The secret code for Anna is 471128." in line


def test_the_template_shows_tools_calls_and_results() -> None:
    session = make_session(KINDS["growth"], TOKENS, 1, count)
    messages = [{"role": "system", "content": session.system}]
    messages += [message for number, step in enumerate(session.steps[:2]) for message in step.messages(number)]
    shown = (
        Environment().from_string(TEMPLATE).render(messages=messages, tools=session.tools, add_generation_prompt=True)
    )
    assert shown.count("<|im_start|>") == 1 + len(messages)
    assert all(json.dumps(tool["function"]["name"]) in shown for tool in session.tools)
    assert "<tool_call>" in shown
    assert session.steps[1].said in shown
