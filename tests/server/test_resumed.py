"""Histories that clients change or cut: permuted results, lost reminders, ids that repeat, thoughts without a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import CHATML, FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS
from .templates import GEMMA, LLAMA_3, MISTRAL, QWEN_3
from .test_history import CHAT, DIALECTS, MESSAGES, RESPONSES, ask, prompt

REMINDER = "<system-reminder>\nThe task list is empty.\n</system-reminder>\n\n"
Rounds = list[list[tuple[str, str]]]  # per round the calls' ids and arguments


TAKEN = ["all is shown", "ids of nine or more", "ids name the function", "results found by id", "no empty answer"]


@pytest.fixture(params=TAKEN)
def engine(request: pytest.FixtureRequest) -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS[request.param]), context_length=1 << 16))
    yield fake
    fake.close()


def of_chat(question: str, rounds: Rounds, order: int) -> dict[str, Any]:
    talk: list[Any] = [{"role": "user", "content": question}]
    for calls in rounds:
        made = [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": json.dumps({"n": n})}}
            for name, n in calls
        ]
        results = [{"role": "tool", "tool_call_id": name, "content": f"result {n}"} for name, n in calls]
        talk += [{"role": "assistant", "content": None, "tool_calls": made}, *results[::order]]
    return {"messages": talk}


def of_messages(question: str, rounds: Rounds, order: int) -> dict[str, Any]:
    talk: list[Any] = [{"role": "user", "content": question}]
    for calls in rounds:
        made = [{"type": "tool_use", "id": name, "name": "f", "input": {"n": n}} for name, n in calls]
        results = [{"type": "tool_result", "tool_use_id": name, "content": f"result {n}"} for name, n in calls]
        talk += [{"role": "assistant", "content": made}, {"role": "user", "content": results[::order]}]
    return {"max_tokens": 9, "messages": talk}


def of_responses(question: str, rounds: Rounds, order: int) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": question}]
    for calls in rounds:
        items += [
            {"type": "function_call", "call_id": name, "name": "f", "arguments": json.dumps({"n": n})}
            for name, n in calls
        ]
        results = [{"type": "function_call_output", "call_id": name, "output": f"result {n}"} for name, n in calls]
        items += results[::order]
    return {"input": items}


SHAPES: dict[str, Callable[[str, Rounds, int], dict[str, Any]]] = {
    CHAT: of_chat,
    MESSAGES: of_messages,
    RESPONSES: of_responses,
}
CONSTANT = "ZsSt4SkI0123456789abcdef"
REPEATED: dict[str, Rounds] = {
    "one id for all": [[(CONSTANT, f"call {i}")] for i in range(20)],
    "the same ids in each round": [[(f"call_{j}", f"call {i}{j}") for j in range(3)] for i in range(5)],
    "made ids that are given": [[(name, f"call {i}")] for i, name in enumerate(["x", "x-2", "x", "x-3", "x-3"])],
    "one id for two calls of a message": [[(CONSTANT, f"call {i}a"), (CONSTANT, f"call {i}b")] for i in range(5)],
}


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("kind", REPEATED)
def test_each_result_stands_at_its_call(client: TestClient, engine: FakeEngine, path: str, kind: str) -> None:
    rounds = REPEATED[kind]
    ask(client, path, SHAPES[path]("Go", rounds, 1))
    shown = re.findall(r"(result )?(call \w+)", prompt(engine))
    expected = [one for calls in rounds for one in ([("", n) for _, n in calls] + [("result ", n) for _, n in calls])]
    assert shown == expected


@pytest.mark.parametrize("name", ["ids name the function", "ids by the template"])
def test_a_result_has_its_calls_number(name: str) -> None:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS[name])))
    given = ["call_a", "functions.f:0", "functions.f:0", "functions.f:2", "functions.f:1"]
    ask(client_of(fake), CHAT, of_chat("Go", [[(one, f"call {i}")] for i, one in enumerate(given)], 1))
    ids = re.findall(r"functions\.f:[0-9]+", prompt(fake))
    fake.close()
    assert ids[::2] == ids[1::2]
    assert len(set(ids)) == (len(given) if name == "ids name the function" else 1)


CONSTANT_WRITTEN = {
    "mistral": '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"n": "call 1"}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"n": "call 1"}<|tool_call_end|><|tool_calls_section_end|>',
}
TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "f"}},
    MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    RESPONSES: {"type": "function", "name": "f"},
}


def ids_of(path: str, answer: dict[str, Any]) -> list[str]:
    if path == CHAT:
        return [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
    if path == MESSAGES:
        return [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    return [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize("path", SHAPES)
@pytest.mark.parametrize("notation", CONSTANT_WRITTEN)
def test_an_id_that_a_model_always_writes_becomes_another_each_time(path: str, notation: str) -> None:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"])))
    fake.says(2 * CONSTANT_WRITTEN[notation])
    room = {"max_tokens": 999} if path == MESSAGES else {}
    client, body = client_of(fake, tool_parser=notation), SHAPES[path]("Go", [], 1) | {"tools": [TOOLS[path]]} | room
    ids = [name for _ in range(3) for name in ids_of(path, ask(client, path, body))]
    fake.close()
    assert len(set(ids)) == len(ids) == 6


@pytest.mark.parametrize("path", SHAPES)
def test_a_resumed_sub_agent_differs_in_its_lost_reminder_alone(
    client: TestClient, engine: FakeEngine, path: str
) -> None:
    rounds = [[(f"c{i}{j}", f"call {i}{j}") for j in range(2)] for i in range(4)]
    ask(client, path, SHAPES[path](f"{REMINDER}Go", rounds, 1))
    before = prompt(engine)
    resumed = SHAPES[path]("Go", rounds, -1)
    late = {"role": "user", "content": "The coordinator sent a message while you were working: stop."}
    resumed["input" if path == RESPONSES else "messages"].append(late)
    ask(client, path, resumed)
    end = before.rindex("<|im_end|>")  # a form puts the user's text into the result before it
    assert prompt(engine).startswith(before[:end].replace(REMINDER, ""))
    assert "The coordinator" in prompt(engine)


# --- Thoughts ---------------------------------------------------------------------------------------------------------

HALF = "Half a thou"
THOUGHT_LAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "reasoning_content": HALF}]},
    MESSAGES: {
        "max_tokens": 99,
        "messages": [
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": HALF, "signature": ""}]},
        ],
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": "Go"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": HALF}]},
        ]
    },
}
CONTINUED = {CHAT: {"continue_final_message": True}, MESSAGES: {}}
CLOSED = "can't show half a thought"


@pytest.fixture
def thinker() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(QWEN_3)))
    yield fake
    fake.close()


@pytest.mark.parametrize("path", DIALECTS)
def test_a_thought_may_be_the_last_message(thinker: FakeEngine, path: str) -> None:
    ask(client_of(thinker), path, THOUGHT_LAST[path])
    assert prompt(thinker).count(HALF) == 1


@pytest.mark.parametrize("path", DIALECTS)
def test_a_lone_thought_is_no_refusal(client: TestClient, engine: FakeEngine, path: str) -> None:
    ask(client, path, THOUGHT_LAST[path])
    assert "Go" in prompt(engine)


@pytest.mark.parametrize("path", CONTINUED)
def test_half_a_thought_goes_on_inside_it(thinker: FakeEngine, path: str) -> None:
    thinker.says("ght.</think>\n\nDone.")
    answer = ask(client_of(thinker), path, THOUGHT_LAST[path] | CONTINUED[path])
    assert prompt(thinker).endswith(f"<think>\n{HALF}")
    assert "warnings" not in answer
    if path == CHAT:
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("ght.", "Done.")
    else:
        assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["ght.", "Done."]


@pytest.mark.parametrize("path", CONTINUED)
def test_a_template_that_drops_it_is_named(client: TestClient, engine: FakeEngine, path: str) -> None:
    answer = ask(client, path, THOUGHT_LAST[path] | CONTINUED[path])
    assert [CLOSED in warning for warning in answer["warnings"]] == [True]


def with_last(path: str, thought: str | None) -> dict[str, Any]:
    """A body whose thought, None for an empty message, has words of the question."""
    last: Any = {"content": ""}
    if thought and path == CHAT:
        last["reasoning_content"] = thought
    elif thought:
        last["content"] = [{"type": "thinking", "thinking": thought, "signature": ""}]
    question = {"role": "user", "content": "The log is long. Which error is it?"}
    return THOUGHT_LAST[path] | {"messages": [question, {"role": "assistant", **last}]} | CONTINUED[path]


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA_3, GEMMA, MISTRAL, FORMS["no empty answer"], FORMS["calls beside null"]]
)
@pytest.mark.parametrize("path", CONTINUED)
def test_an_answer_is_opened_where_there_is_none_to_go_on_with(path: str, template: str) -> None:
    fake = FakeEngine(FakePair(byte_tokenizer(template)))
    client = client_of(fake)
    prompts, warnings = list[str](), list[Any]()
    for thought in (None, "The", "is"):
        body = with_last(path, thought)
        warnings.append(ask(client, path, body).get("warnings", []))
        prompts.append(prompt(fake))
    opened = {name: value for name, value in body.items() if name not in CONTINUED[path]}
    ask(client, path, opened | {"messages": body["messages"][:1]})
    fake.close()
    assert set(prompts) == {prompt(fake)}
    assert [[CLOSED in warning for warning in one] for one in warnings] == [[], [True], [True]]


@pytest.mark.parametrize("path", CONTINUED)
def test_an_answer_goes_on_inside_words_that_stand_elsewhere_too(thinker: FakeEngine, path: str) -> None:
    for thought in ("The", "i", "Qk0zX"):
        answer = ask(client_of(thinker), path, with_last(path, thought))
        assert prompt(thinker).endswith(f"<think>\n{thought}")
        assert "warnings" not in answer


def test_an_answer_does_not_go_on_inside_a_reminder(client: TestClient, engine: FakeEngine) -> None:
    talk = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Half"}]
    late = {"role": "system", "content": "<total_tokens>5</total_tokens>"}
    for goes_on in (False, True):
        ask(client, CHAT, {"messages": [*talk, late], "continue_final_message": goes_on})
    one, other = (list(request.prompt) for request in engine.requests)
    assert one == other
