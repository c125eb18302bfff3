"""Cached prompts of an engine: listed, dropped, and requested while it works."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import (
    Engine,
    EngineClosedError,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    Inspection,
    InvalidRequestError,
    Progress,
    RequestCancelled,
    RequestHandle,
    SettingsError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.cache.prefix.tree import PrefixCache
from mlx_specprefill.engine.requests.drafting import AnswerDrafter
from mlx_specprefill.engine.thread.meter import Meter
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

POLICY = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(1, 5), densify=False)
PROMPT = random_prompt(600)
KEPT = {("target", 600), ("draft", 600)}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    config = EngineConfig(policy=POLICY, prefill_step=64, prefix_cache_bytes=64 << 20, prefix_cache_dir=tmp_path)
    with Engine(tiny_pair(), config) as running:
        yield running


def ask(engine: Engine, sparse: bool) -> int:
    """Cached tokens of an answer."""
    _, last = generated(engine.generate(GenerationRequest(PROMPT, 3, specprefill=SpecPrefillOptions(sparse))))
    return last.report.cached_tokens


def test_what_is_kept_is_listed_by_kind_and_says_nothing_of_the_tokens(engine: Engine) -> None:
    assert engine.cached() == ()
    ask(engine, sparse=False)
    (prefix,) = engine.cached()
    assert (prefix.kind, prefix.tokens, prefix.hits) == ("target", len(PROMPT) + 3, 0)
    assert prefix.nbytes > 0
    ask(engine, sparse=False)
    assert max(entry.hits for entry in engine.cached()) == 1
    ask(engine, sparse=True)
    assert {entry.kind for entry in engine.cached()} == {"target", "draft", "session"}
    assert len({entry.id for entry in engine.cached()}) == len(engine.cached())


def test_a_request_for_no_tokens_is_kept_and_the_draft_reads_it_in_idle_time() -> None:
    policy = replace(POLICY, threshold=10_000, densify=True, on_battery=True)
    with Engine(tiny_pair(), EngineConfig(policy=policy, prefix_cache_bytes=64 << 20)) as engine:
        tokens, last = generated(engine.generate(GenerationRequest(PROMPT, 0)))
        assert isinstance(last, Finished)
        assert (tokens, last.reason) == ([], "length")
        assert eventually(lambda: {(entry.kind, entry.tokens) for entry in engine.cached()} == KEPT)


@pytest.mark.parametrize("kind", ["target", "draft", "session"])
def test_a_dropped_entry_is_gone_and_the_others_stay(engine: Engine, kind: str) -> None:
    ask(engine, sparse=True)
    ask(engine, sparse=False)
    before = engine.cached()
    for entry in (entry for entry in before if entry.kind == kind):
        assert engine.drop_cached(entry.id)
        assert not engine.drop_cached(entry.id)
    left = engine.cached()
    assert {entry.id for entry in left} == {entry.id for entry in before if entry.kind != kind}
    if kind == "target":
        assert ask(engine, sparse=False) == 0


def test_everything_is_dropped_at_once_with_its_bytes(engine: Engine) -> None:
    ask(engine, sparse=True)
    ask(engine, sparse=False)
    assert engine.drop_cached()
    assert engine.cached() == ()
    assert engine.stats().memory.prefix_cache == 0
    assert eventually(lambda: engine.stats().memory.prefix_disk == 0)  # its thread deletes in its own time


def holding(started: threading.Event, until: threading.Event) -> Callable[[Event], None]:
    """A callback that keeps the engine from going on."""

    def on_event(_: Event) -> None:
        started.set()
        until.wait(60)

    return on_event


def test_it_answers_while_a_prompt_is_read(engine: Engine) -> None:
    """Asked for while the first slice is held, and told before the last."""
    started, asked_for = threading.Event(), threading.Event()
    request = GenerationRequest(random_prompt(3000, 2), 1)
    handle = engine.submit(request, holding(started, asked_for))
    assert started.wait(60)
    with ThreadPoolExecutor(1) as other:
        cached = other.submit(engine.cached)
        assert eventually(lambda: bool(engine._inbox))
        assert engine.health().running == 1
        asked_for.set()
        assert cached.result(60) == ()
    handle.cancel()


def test_a_closed_engine_says_so(engine: Engine) -> None:
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.cached()
    with pytest.raises(EngineClosedError):
        engine.drop_cached()


def test_an_inspection_without_waiting_agrees_with_one_that_waits(engine: Engine) -> None:
    done: queue.SimpleQueue[Inspection | Exception] = queue.SimpleQueue()
    request = GenerationRequest(PROMPT, 1)
    engine.submit_inspection(request, lambda _: None, done.put)
    result = done.get(timeout=60)
    assert isinstance(result, Inspection)
    waited = engine.inspect(request)
    assert [chunk.kept_tokens for chunk in result.chunks] == [chunk.kept_tokens for chunk in waited.chunks]
    scores = [chunk.score for chunk in waited.chunks]
    assert [chunk.score for chunk in result.chunks] == pytest.approx(scores, rel=1e-4)
    kept = {index for start, end in result.kept_spans for index in range(start, end)}
    assert len(kept) == result.kept_tokens
    with pytest.raises(InvalidRequestError):
        engine.submit_inspection(GenerationRequest((), 1), lambda _: None, done.put)


def test_a_cancelled_inspection_ends_once_and_the_engine_goes_on(engine: Engine) -> None:
    done: queue.SimpleQueue[Inspection | Exception] = queue.SimpleQueue()
    started, cancelled = threading.Event(), threading.Event()
    request = GenerationRequest(random_prompt(3000, 3), 1)
    handle = engine.submit_inspection(request, holding(started, cancelled), done.put)
    assert started.wait(60)
    handle.cancel()
    cancelled.set()
    assert isinstance(done.get(timeout=60), RequestCancelled)
    assert done.empty()
    assert ask(engine, sparse=False) == 0


def test_the_meter_counts_whole_seconds_of_the_last_five() -> None:
    now = [10.2]
    meter = Meter(lambda: now[0])
    assert meter.per_second() == 0
    for second, count in ((10.2, 5), (10.9, 5), (12.0, 15)):
        now[0] = second
        meter.add(count)
    assert meter.per_second() == 2  # the running second is left out
    now[0] = 13.5
    assert meter.per_second() == 5
    now[0] = 16.0
    assert meter.per_second() == 3
    now[0] = 30.0
    assert meter.per_second() == 0


# --- the first token does not wait for the store ---------------------------------------------------------------------


def stores(monkeypatch: pytest.MonkeyPatch, seen: list[str]) -> None:
    """Write down every store of a prompt's prefix."""
    store = PrefixCache.store

    def watched(self: PrefixCache, tokens: Sequence[int], *args: Any, **kwargs: Any) -> None:
        seen.append(f"store {len(tokens)}")
        store(self, tokens, *args, **kwargs)

    monkeypatch.setattr(PrefixCache, "store", watched)


@pytest.mark.parametrize(("family", "stored"), [("llama", 600), ("qwen3_5", 599), ("gpt_oss", 599)])
def test_a_prompt_is_kept_once_its_first_token_is_out(
    family: str, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    ended = threading.Event()
    stores(monkeypatch, seen)

    def look(event: Event) -> None:  # on the thread that stores
        seen.append(type(event).__name__)
        if isinstance(event, Finished):
            ended.set()

    with Engine(tiny_pair(family), EngineConfig(policy=POLICY, prefill_step=64)) as engine:
        engine.submit(GenerationRequest(PROMPT, 3, specprefill=SpecPrefillOptions(False)), look)
        assert ended.wait(60)
        assert seen.index("TokenEvent") < seen.index(f"store {stored}") < seen.index("Finished")
        assert ask(engine, sparse=False) == 599


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_prompt_is_kept_if_its_first_token_is_the_last(family: str) -> None:
    with Engine(tiny_pair(family), EngineConfig(policy=POLICY)) as engine:
        list(engine.generate(GenerationRequest(PROMPT, 1, specprefill=SpecPrefillOptions(False))))
        assert ask(engine, sparse=False) == 599


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_prompt_is_kept_if_its_client_leaves_before_the_first_token(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last forward and the answer, where a proposer is made."""
    with Engine(tiny_pair(family), EngineConfig(policy=POLICY)) as engine:
        handles: list[RequestHandle] = []
        ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def end(*_: object) -> Iterator[Progress]:
            handles[0].cancel()
            yield Progress("draft", 0, 1)

        with monkeypatch.context() as patch:
            patch.setattr(AnswerDrafter, "end", end)
            options = SpecPrefillOptions(False, speculative="ngram")
            request = GenerationRequest(PROMPT, 3, specprefill=options)
            handles.append(engine.submit(request, ended.put))
            while not isinstance(last := ended.get(timeout=60), Finished):
                pass
        assert last.reason == "cancelled"
        assert ask(engine, sparse=False) == 599


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_disk_if_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    config = EngineConfig(policy=POLICY, prefix_cache_dir=tmp_path / "file" / "cache")
    with pytest.raises(SettingsError, match="prefix cache folder can't be used"):
        Engine(tiny_pair(), config)
    with Engine(tiny_pair(), replace(config, prefix_cache_optional=True)) as engine:
        assert "no disk cache" in caplog.text
        assert [ask(engine, sparse=False), ask(engine, sparse=False) > 0] == [0, True]
        assert not any(entry.on_disk for entry in engine.cached())
