"""Rendering and tokenizing beside each other: nobody waits for one long prompt, nobody's work is done for nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from mlx_specprefill_server.prompt.builder import WORKERS, PromptBuilder, Workers
from mlx_specprefill_server.routes import status
from tests.support.waiting import eventually

from .conftest import client_of
from .fakes import FakeEngine, byte_tokenizer

HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def blocked(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prompts that say "stuck" take until the event is set; all texts that were begun are listed."""
    release, begun = threading.Event(), []
    real = PromptBuilder._tokenize

    def tokenize(self: PromptBuilder, fitted: Any, field: str) -> Any:
        begun.append(fitted.text)
        if "stuck" in fitted.text:
            release.wait(60)
        return real(self, fitted, field)

    monkeypatch.setattr(PromptBuilder, "_tokenize", tokenize)
    yield release, begun
    release.set()


def ask(base: str, text: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": text}]}
    return httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60)


def start(base: str, text: str) -> threading.Thread:
    thread = threading.Thread(target=ask, args=(base, text))
    thread.start()
    return thread


def test_a_long_prompt_leaves_the_others_a_worker(base: str, blocked: Any) -> None:
    assert WORKERS > 1
    release, begun = blocked
    threads = [start(base, f"stuck {i}") for i in range(WORKERS - 1)]
    assert eventually(lambda: len(begun) == WORKERS - 1)
    assert ask(base, "short").status_code == 200
    release.set()
    for thread in threads:
        thread.join(60)


def test_a_prompt_whose_client_left_is_never_begun(base: str, blocked: Any) -> None:
    release, begun = blocked
    threads = [start(base, f"stuck {i}") for i in range(WORKERS)]
    assert eventually(lambda: len(begun) == WORKERS)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{base}/v1/chat/completions", json={"messages": HI}, timeout=0.5)
    assert eventually(lambda: httpx.get(f"{base}/health", timeout=60).json()["prompts_waiting"] == 0)
    release.set()
    for thread in threads:
        thread.join(60)
    assert ask(base, "last").status_code == 200
    assert not [text for text in begun if "Hi" in text]


def test_a_prompt_that_never_ends_shows_in_health(
    engine: FakeEngine, blocked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "STALE_AFTER_S", 0.2)
    client = client_of(engine)
    thread = threading.Thread(target=client.post, args=("/tokenize",), kwargs={"json": {"messages": [*HI, stuck()]}})
    assert client.get("/health").status_code == 200
    thread.start()
    assert eventually(lambda: client.get("/health").status_code == 503)
    answer = client.get("/health").json()
    assert "rendered and tokenized for" in answer["error"]["message"]
    assert answer["prompts_longest_s"] > 0.2
    blocked[0].set()
    thread.join(60)
    assert eventually(lambda: client.get("/health").status_code == 200)


def stuck() -> dict[str, str]:
    return {"role": "user", "content": "stuck"}


def test_a_tokenizer_that_is_not_known_to_be_safe_gets_one_thread() -> None:
    tokenizer = byte_tokenizer()
    assert PromptBuilder(tokenizer).workers._pool._max_workers == WORKERS

    class Slow:
        is_fast = False

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    assert PromptBuilder(Slow()).workers._pool._max_workers == 1


def test_many_threads_make_the_same_tokens() -> None:
    builder = PromptBuilder(byte_tokenizer())
    texts = [f"text {i} " * 200 for i in range(40)]

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(builder.raw(text) for text in texts))

    for text, prompt in zip(texts, asyncio.run(all_at_once()), strict=True):
        assert list(prompt.tokens) == builder._tokenizer.encode(text)


def test_a_failed_call_is_over() -> None:
    workers = Workers(1)

    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 / 0)

    asyncio.run(fail())
    time.sleep(0.01)
    assert (workers.waiting, workers.longest_s) == (0, 0.0)


def test_a_call_that_ends_like_an_iterator_fails_and_does_not_hang() -> None:
    workers = Workers(1)
    with pytest.raises(RuntimeError, match="ended like an iterator"):
        asyncio.run(asyncio.wait_for(workers.run(lambda: next(iter(()))), 60))
    workers.close()
