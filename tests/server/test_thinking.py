"""A thinking budget in every dialect's words, and what the model's format makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from mlx_specprefill_server.notations.formats import detect
from mlx_specprefill_server.pairs import Pair
from mlx_specprefill_server.settings.pair import make_settings
from mlx_specprefill_server.settings.server import Settings

from .conftest import client_of
from .fakes import CHATML, FakeEngine, FakePair, byte_tokenizer
from .templates import QWEN_3

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 50},
}
TOKENIZER = byte_tokenizer()
OPEN, SHUT = (TOKENIZER.get_added_vocab()[name] for name in ("<think>", "</think>"))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"reasoning": {"max_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ({"reasoning": {"max_tokens": 0}, "thinking": {"budget_tokens": 9}}, 0),
        ({"reasoning": {"effort": "low"}}, None),
        ({"thinking": {"type": "adaptive"}}, None),
        ({}, None),
    ],
)
def test_the_budget_reaches_the_engine(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], tokens: int | None
) -> None:
    answer = client.post(path, json={**BODIES[path], **fields})
    assert answer.status_code == 200, answer.text
    budget = engine.requests[-1].reasoning
    assert (None if budget is None else budget.tokens) == tokens
    if budget is not None:
        assert (budget.start, budget.end, budget.closing, budget.opened) == ((OPEN,), (SHUT,), (SHUT,), False)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [-1, "5", 1.5, True])
def test_no_budget(client: TestClient, engine: FakeEngine, path: str, value: Any) -> None:
    for name, inner in (("reasoning", "max_tokens"), ("thinking", "budget_tokens")):
        answer = client.post(path, json={**BODIES[path], name: {inner: value}})
        assert answer.status_code == 400
        assert f"{name}.{inner}" in answer.json()["error"]["message"]
    assert not engine.requests


def test_reasoning_that_the_prompt_has_opened_counts_from_its_start(engine: FakeEngine) -> None:
    engine.pair = FakePair(tokenizer=byte_tokenizer(CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"))
    client_of(engine).post("/v1/chat/completions", json={"messages": HI, "reasoning": {"max_tokens": 7}})
    budget = engine.requests[-1].reasoning
    assert budget.opened


def test_a_model_that_does_not_think_keeps_to_every_budget() -> None:
    tokenizer = byte_tokenizer(CHATML)
    format_ = detect(tokenizer)
    assert format_.budget(5, "") is not None
    mistral = detect(tokenizer, reasoning="mistral")
    assert mistral.budget(5, "") is not None
    bare = type(format_)("hermes", None)
    assert bare.budget(5, "") is None


def test_harmony_goes_on_in_another_channel() -> None:
    special = TOKENIZER.get_added_vocab()
    budget = detect(byte_tokenizer(CHATML), tools="harmony").budget(5, "<|start|>assistant")
    assert budget.start == (special["<|channel|>"], *TOKENIZER.encode("analysis", add_special_tokens=False))
    assert budget.end == (special["<|end|>"],)
    assert budget.closing[:2] == (special["<|end|>"], special["<|start|>"])
    opened = "<|start|>assistant<|channel|>analysis<|message|>Hm"
    assert [detect(byte_tokenizer(), tools="harmony").budget(5, text).opened for text in ("", opened)] == [False, True]


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning": {"enabled": True}}, True),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_chat_understands_all_words_for_thinking(engine: FakeEngine, fields: dict[str, Any], thinks: bool) -> None:
    engine.pair = FakePair(tokenizer=byte_tokenizer(QWEN_3))
    client_of(engine).post("/v1/chat/completions", json={"messages": HI, **fields})
    prompt = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    assert prompt.endswith("</think>\n\n") is not thinks


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_every_dialect_takes_a_templates_arguments(engine: FakeEngine, path: str) -> None:
    engine.pair = FakePair(tokenizer=byte_tokenizer(QWEN_3))
    given = {"input": "Hi"} if path == "/v1/responses" else {"messages": HI, "max_tokens": 9}
    body = {**given, "thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}}
    client_of(engine).post(path, json=body)
    assert engine.pair.tokenizer.decode(list(engine.requests[-1].prompt)).endswith("</think>\n\n")


# --- Thoughts of finished turns ---------------------------------------------------------------------------------------

NEWEST = "loop.index0 > ns.last_query_index and (loop.last or reasoning_content)"
LAST = "loop.index0 > ns.last_query_index"
SHOWN_IF = {  # the kinds of templates, and the argument with which a conversation only grows
    "Qwen 3.5": (LAST, {}),
    "Qwen 3.6": (
        f"(preserve_thinking is defined and preserve_thinking is true) or {LAST}",
        {"preserve_thinking": True},
    ),
    "Qwen 3.8": (f"preserve_thinking is undefined or preserve_thinking is true or {LAST}", {}),
    "Kimi K2.6": (f"preserve_thinking | default(false) or {LAST}", {"preserve_thinking": True}),
    "GLM 4.7": (f"(clear_thinking is defined and not clear_thinking) or {LAST}", {"clear_thinking": False}),
    "Nemotron 3": (f"not truncate_history_thinking | default(true) or {LAST}", {"truncate_history_thinking": False}),
    "Gemma 4": (  # keeps those of calls, and so all of a turn but its end
        f"{LAST} or (preserve_thinking | default(false) and message.tool_calls)",
        {"preserve_thinking": True},
    ),
    "all always": ("true", {}),
    "none ever": ("false", {}),
}
GROWS = [name for name in SHOWN_IF if name not in ("Qwen 3.5", "Gemma 4", "none ever")]


def thinker(engine: FakeEngine, kind: str, **settings: Any) -> TestClient:
    assert NEWEST in QWEN_3
    engine.pair = FakePair(byte_tokenizer(QWEN_3.replace(NEWEST, SHOWN_IF[kind][0])), context_length=1 << 16)
    return client_of(engine, **settings)


def history(turns: int, name: str = "reasoning_content") -> list[dict[str, Any]]:
    """Finished turns, each with a thought before a call and one before an answer, and a new question."""
    talk: list[dict[str, Any]] = []
    for i in range(turns):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": f'{{"n": {i}}}'}}
        thoughts = [f"Call it, {i}.", f"It is said, {i}."]
        given: list[Any] = [[{"type": "reasoning.text", "text": t}] for t in thoughts]
        first, second = given if name == "reasoning_details" else thoughts
        talk += [
            {"role": "user", "content": f"Question {i}?"},
            {"role": "assistant", "content": "", "tool_calls": [call], name: first},
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"Result {i}."},
            {"role": "assistant", "content": f"Answer {i}.", name: second},
        ]
    return [*talk, {"role": "user", "content": f"Question {turns}?"}]


def rendered(client: TestClient, engine: FakeEngine, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = client.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    text: str = engine.pair.tokenizer.decode(list(engine.requests[-1].prompt))
    return text


def grows(client: TestClient, engine: FakeEngine, name: str = "reasoning_content", **fields: Any) -> bool:
    """Check that each of ten prompts begins with the one before, up to its answer, and shows all thoughts."""
    texts = [rendered(client, engine, history(turns, name), **fields) for turns in range(1, 11)]
    begins = [text[: text.rindex("<|im_start|>assistant")] for text in texts]
    whole = all(f"said, {i}." in texts[-1] and f"it, {i}." in texts[-1] for i in range(10))
    return whole and all(later.startswith(before) for before, later in zip(begins, texts[1:], strict=False))


@pytest.mark.parametrize("kind", SHOWN_IF)
def test_thoughts_of_finished_turns_stay_where_the_template_can_keep_them(engine: FakeEngine, kind: str) -> None:
    client = thinker(engine, kind)
    assert grows(client, engine) == (kind in GROWS)
    assert client.get("/v1/models").json()["data"][0]["template_kwargs"] == SHOWN_IF[kind][1]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "reasoning_details"])
def test_a_thought_has_three_names(engine: FakeEngine, name: str) -> None:
    assert grows(thinker(engine, "Qwen 3.6"), engine, name)


def test_a_request_wins_over_the_server_and_the_server_over_the_template(engine: FakeEngine) -> None:
    client = thinker(engine, "Qwen 3.6", template_kwargs='{"preserve_thinking": false, "enable_thinking": false}')
    assert client.get("/v1/models").json()["data"][0]["template_kwargs"] == {
        "preserve_thinking": False,
        "enable_thinking": False,
    }
    assert not grows(client, engine)
    assert rendered(client, engine, HI).endswith("</think>\n\n")
    assert grows(client, engine, chat_template_kwargs={"preserve_thinking": True})
    assert not rendered(client, engine, HI, chat_template_kwargs={"enable_thinking": True}).endswith("</think>\n\n")


@pytest.mark.parametrize("value", ["", "[1]", "{", '{"tools": 1}', '{"a b": 1}'])
def test_what_is_no_argument_of_a_template(value: str) -> None:
    with pytest.raises(ValidationError, match=r"template_kwargs"):
        Settings(template_kwargs=value)


def test_a_model_of_a_table_has_its_own_arguments() -> None:
    pair = Pair(target="t", template_kwargs={"enable_thinking": False})
    assert make_settings(pair).template_kwargs == {"enable_thinking": False}
    assert make_settings(pair, template_kwargs='{"a": 1}').template_kwargs == {"a": 1}
