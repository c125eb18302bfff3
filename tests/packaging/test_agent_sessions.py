"""Generated sessions of agents: their sizes, and that what they ask for was said before."""

from __future__ import annotations

import json
import random
import statistics

import pytest
from benchmarks.harness.agent_edits import TOKENS as EDITED
from benchmarks.harness.agent_edits import make_edits
from benchmarks.harness.agent_sessions import KINDS, TEMPLATE, Session, make_session, result, sizes
from jinja2 import Environment

TOKENS = 6000
SESSIONS = 6  # three seeds, two repetitions


def count(text: str) -> int:
    return (len(text) + 3) // 4


def grown(session: Session) -> int:
    """Tokens of everything that is said in it."""
    calls = sum(count(json.dumps(step.call)) for step in session.steps if step.call)
    return session.opening + calls + sum(count(step.said) for step in session.steps)


@pytest.mark.parametrize("kind", KINDS)
def test_every_fact_that_is_asked_for_was_said_once_in_the_step_that_is_named(kind: str) -> None:
    session = make_session(KINDS[kind], TOKENS, 1, count)
    steps = (*session.steps, *session.after)
    for number, step in enumerate(steps):
        if step.code:
            name = step.said.rpartition("What is the secret code for ")[2].removesuffix("?")
            said = [f"The secret code for {name} is " in other.said for other in steps]
            assert said == [at == step.told for at in range(len(steps))]
            assert f"The secret code for {name} is {step.code}." in steps[step.told].said
            assert step.told < number or number == 0
    assert sum(bool(step.code) for step in session.steps) >= 1


@pytest.mark.parametrize("kind", ["growth", "long results"])
def test_six_sessions_ask_for_a_hundred_facts(kind: str) -> None:
    sessions = [make_session(KINDS[kind], 7000, seed, count) for seed in range(SESSIONS)]
    assert sum(bool(step.code) for session in sessions for step in (*session.steps, *session.after)) >= 100


def test_a_session_has_fifteen_turns_and_the_size_that_was_wanted() -> None:
    session = make_session(KINDS["growth"], TOKENS, 1, count)
    assert len(session.steps) == 15
    assert 0.9 * TOKENS < grown(session) < 1.15 * TOKENS
    assert 0.2 * TOKENS < session.opening < 0.3 * TOKENS


@pytest.mark.parametrize("tokens", [4000, 8000])
def test_a_document_is_asked_ten_questions_about_facts_all_over_it(tokens: int) -> None:
    session = make_session(KINDS["document"], tokens, 1, count)
    assert [bool(step.code) for step in session.steps] == [True] * 10
    assert session.tools == []
    assert session.after == ()
    assert 0.95 * tokens < grown(session) < 1.05 * tokens
    places = sorted(session.steps[0].said.index(step.code) / len(session.steps[0].said) for step in session.steps)
    assert places == pytest.approx([(number + 0.5) / 10 for number in range(10)], abs=0.05)


@pytest.mark.parametrize("tokens", [5200, 24000])
def test_sizes_of_results_are_those_of_recorded_sessions(tokens: int) -> None:
    drawn = [sizes(random.Random(seed), tokens) for seed in range(300)]
    every = [size for session in drawn for size in session]
    assert all(0.9 * tokens < sum(session) < 1.1 * tokens for session in drawn)
    assert statistics.median(every) == pytest.approx(256, rel=0.1)
    assert 0.08 < sum(size > 2149 for size in every) / len(every) < 0.14
    assert max(every) <= 22318
    assert sum(size for size in every if size > 2048) / sum(every) == pytest.approx(0.59, abs=0.03)


def test_a_small_session_has_results_that_are_all_smaller() -> None:
    assert sum(sizes(random.Random(1), 500)) == pytest.approx(500, rel=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_long_results_end_with_one_that_is_worth_sending_again(seed: int) -> None:
    said = [
        count(step.said) for step in make_session(KINDS["long results"], TOKENS, seed, count).steps[1:] if step.call
    ]
    assert said[-1] == sorted(said)[-2]


def test_the_same_seed_gives_the_same_session_and_another_one_another() -> None:
    for shape in KINDS.values():
        assert make_session(shape, TOKENS, 1, count) == make_session(shape, TOKENS, 1, count)
        assert make_session(shape, TOKENS, 1, count).steps != make_session(shape, TOKENS, 2, count).steps


@pytest.mark.parametrize("kind", ["read", "search", "edit", "test"])
def test_results_are_as_long_as_wanted_and_carry_each_fact_in_one_line(kind: str) -> None:
    facts = ["The secret code for Anna is 471128.", "The secret code for Ben is 902113."]
    text = result(kind, random.Random(1), 800, count, facts)
    assert 700 < count(text) < 900
    for fact in facts:
        (line,) = (line for line in text.splitlines() if fact[-7:] in line)
        assert fact in line


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


def test_an_edit_inserts_and_changes_nothing_else() -> None:
    """A tool and lines in turn, some 200 tokens each. Nothing that was given is changed in place."""
    session = make_session(KINDS["growth"], TOKENS, 1, count)
    history = [message for number, step in enumerate(session.steps) for message in step.messages(number)]
    before = json.dumps([history, session.tools])
    edits = make_edits(4, "1", count)
    assert [edit.tool is None for edit in edits] == [False, True, False, True]
    for edit in edits:
        messages, tools = edit.apply(history, session.tools)
        inserted = json.dumps(edit.tool) if edit.tool else edit.lines
        assert 0.7 * EDITED < count(inserted) < 1.3 * EDITED
        texts = [message["content"] for message in messages]
        assert [text.replace(f"{edit.lines}\n", "") if edit.lines else text for text in texts] == [
            message["content"] for message in history
        ]
        assert [tool for tool in tools if tool != edit.tool] == session.tools
        assert (len(tools) > len(session.tools)) == (edit.tool is not None)
        assert len("".join(texts)) + len(tools) > len("".join(m["content"] for m in history)) + len(session.tools)
    assert json.dumps([history, session.tools]) == before
