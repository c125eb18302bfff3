"""A thinking budget in every dialect's words, and what the model's format makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.parsers.formats import detect

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
