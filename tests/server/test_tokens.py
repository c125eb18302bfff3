"""Text to tokens and back; in the fakes' tokenizer one byte is one token."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer

HI = [{"role": "user", "content": "Hi"}]
RENDERED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def ids(engine: FakeEngine, text: str) -> list[int]:
    found: list[int] = engine.pair.tokenizer.encode(text, add_special_tokens=False)
    return found


@pytest.mark.parametrize("field", ["content", "prompt"])
def test_a_text_becomes_ids(engine: FakeEngine, client: TestClient, field: str) -> None:
    answer = client.post("/tokenize", json={field: "Zoë"}).json()
    assert answer == {"tokens": ids(engine, "Zoë"), "count": 4, "max_model_len": 4096}


def test_an_empty_text_has_no_tokens(client: TestClient) -> None:
    assert client.post("/tokenize", json={"content": ""}).json()["tokens"] == []


def test_special_tokens_are_read_as_such(engine: FakeEngine, client: TestClient) -> None:
    answer = client.post("/tokenize", json={"content": "a<|im_end|>"}).json()
    assert answer["tokens"] == [*ids(engine, "a"), engine.pair.tokenizer.eos_token_id]


def test_a_conversation_becomes_the_ids_of_the_prompt(engine: FakeEngine, client: TestClient) -> None:
    answer = client.post("/tokenize", json={"messages": HI}).json()
    client.post("/v1/chat/completions", json={"messages": HI})
    assert answer["tokens"] == engine.requests[-1].prompt.tolist()


@pytest.mark.parametrize("text", ["", "plain", " spaces  kept ", "Zoë 日本", "<|im_start|>x"])
def test_there_and_back(client: TestClient, text: str) -> None:
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    answer = client.post("/detokenize", json={"tokens": tokens})
    assert answer.json() == {"content": text, "prompt": text}


def test_a_template_is_applied(client: TestClient) -> None:
    assert client.post("/apply-template", json={"messages": HI}).json() == {"prompt": RENDERED}


def test_a_model_without_template_says_so() -> None:
    engine = FakeEngine(FakePair(byte_tokenizer(template=None)))
    for path in ("/apply-template", "/tokenize"):
        answer = client_of(engine).post(path, json={"messages": HI})
        assert answer.status_code == 400
        assert "no chat template" in answer.json()["error"]["message"]
    engine.close()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"content": "a", "messages": HI}, "messages"),
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        (
            "/tokenize",
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": HI, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ],
)
def test_what_makes_no_sense_is_refused(client: TestClient, path: str, body: Any, param: str | None) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_how_a_rendered_conversation_ends(client: TestClient) -> None:
    body = {"messages": [*HI, {"role": "assistant", "content": "Good mor"}], "continue_final_message": True}
    text = client.post("/apply-template", json=body).json()["prompt"]
    assert text.endswith("assistant\nGood mor")
    tokens = client.post("/tokenize", json=body).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
