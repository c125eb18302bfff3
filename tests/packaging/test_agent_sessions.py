"""Generated sessions of agents: their sizes, and that what they ask for was said before."""

from __future__ import annotations

import json

import pytest
from benchmarks.harness.agent_edits import TOKENS as EDITED
from benchmarks.harness.agent_edits import make_edits
from benchmarks.harness.agent_sessions import KINDS, Session, make_session

TOKENS = 6000


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


def test_a_session_has_fifteen_turns_and_the_size_that_was_wanted() -> None:
    session = make_session(KINDS["growth"], TOKENS, 1, count)
    assert len(session.steps) == 15
    assert 0.9 * TOKENS < grown(session) < 1.15 * TOKENS
    assert 0.2 * TOKENS < session.opening < 0.3 * TOKENS


def test_the_same_seed_gives_the_same_session_and_another_one_another() -> None:
    for shape in KINDS.values():
        assert make_session(shape, TOKENS, 1, count) == make_session(shape, TOKENS, 1, count)
        assert make_session(shape, TOKENS, 1, count).steps != make_session(shape, TOKENS, 2, count).steps


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
