"""Texts that can't fit the context are refused before they are tokenized; those that can never are."""

from __future__ import annotations

import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from starlette.testclient import TestClient
from tokenizers import AddedToken, normalizers

from mlx_specprefill import ContextLengthError
from mlx_specprefill_server.prompt.builder import PromptBuilder
from tests.support.examples import examples

from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer

DEMO = load_tokenizer(Path(__file__).parents[2] / "models" / "demo" / "target")


def guard(tokenizer: Any, context_length: int | None) -> PromptBuilder:
    return PromptBuilder(tokenizer, context_length)


def test_where_memory_leaves_no_room_no_text_fits() -> None:
    with pytest.raises(ContextLengthError):
        guard(byte_tokenizer(), 0).check_length("a", "prompt")


def demo_client(engine: FakeEngine) -> TestClient:
    engine.pair = FakePair(tokenizer=DEMO, context_length=4096)
    return client_of(engine)


LARGE = "The quick brown fox jumps over the lazy dog. " * (30 * 2**20 // 45)
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LARGE}]},
    "/v1/completions": {"prompt": LARGE},
    "/v1/responses": {"input": LARGE},
    "/v1/specprefill/explain": {"prompt": LARGE},
    "/tokenize": {"content": LARGE},
}


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_thirty_megabytes_are_refused_at_once(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    client = demo_client(engine)
    tokenized: list[str] = []
    monkeypatch.setattr(client.app.state.models.default.service.prompts, "_tokenize", tokenized.append)  # type: ignore[attr-defined]
    begun = time.monotonic()
    answer = client.post(path, json=body)
    assert time.monotonic() - begun < 15  # seconds of a busy machine; tokenizing takes a minute of an idle one
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == 4096
    assert error["n_prompt_tokens"] > 4096
    assert error["param"] in body
    assert not tokenized
    assert not engine.requests


def test_the_tokens_that_were_counted_are_told_in_every_dialect(engine: FakeEngine) -> None:
    answer = demo_client(engine).post("/v1/messages", json=BODIES["/v1/chat/completions"] | {"max_tokens": 9})
    told = re.fullmatch(r"prompt is too long: (\d+) tokens > 4096 maximum", answer.json()["error"]["message"])
    assert int(told[1]) > 2 * 4096


def test_a_refused_text_leaves_nothing_behind() -> None:
    """The tokens and places of 30 MB took 6 GB."""
    guarded = guard(DEMO, 4096)
    tracemalloc.start()
    try:
        with pytest.raises(ContextLengthError):
            guarded.check_length(LARGE, "prompt")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is read piece by piece until there is too much of it."""
    guarded = guard(DEMO, 1000)
    counted: list[int] = []
    count = guarded._count
    monkeypatch.setattr(guarded, "_count", lambda text: counted.append(len(text)) or count(text))
    with pytest.raises(ContextLengthError) as caught:
        guarded.check_length(" " * 16_000 + LARGE, "prompt")
    assert caught.value.prompt_tokens > 2000
    assert sum(counted) <= 3 * 16_000


TEXTS = st.text(max_size=60) | st.sampled_from(
    [" " * 200, "the " * 30, "<|im_end|>" * 5, "α\u0313\u0300\u0345" * 9, "e\u0323\u0302" * 9]
)


def nfc() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [DEMO, byte_tokenizer(), nfc()], ids=["demo", "bytes", "composing"])
@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS)
def test_nothing_that_fits_is_refused(tokenizer: Any, text: str) -> None:
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    guard(tokenizer, max(tokens, 1)).check_length(text, "prompt")


def greedy_about_spaces() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|x|>", rstrip=True)]})
    return tokenizer


def stripping() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    return tokenizer


@pytest.mark.parametrize("tokenizer", [greedy_about_spaces(), stripping()], ids=["spaces of a token", "stripped"])
def test_a_text_whose_characters_a_tokenizer_swallows_fits(tokenizer: Any) -> None:
    text = " " * 5000 + "<|x|>" + " " * 5000
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert tokens < 5100
    guard(tokenizer, tokens).check_length(text, "prompt")


def test_without_a_context_length_everything_is_taken() -> None:
    guard(DEMO, None).check_length(LARGE, "prompt")
