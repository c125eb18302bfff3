"""Every byte that MLX holds is somebody's: many turns, many sessions, and whatever ended how."""

from __future__ import annotations

import gc
import logging
import queue
import random
import weakref
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    PromptSpan,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationName,
    TokenEvent,
)
from tests.engine.held import unaccounted
from tests.support.tiny import random_prompt, tiny_pair
from tests.support.waiting import eventually

# Bytes. MLX reuses freed memory for arrays that are up to two pages smaller, which nobody accounts for. The chats below
# would leak at least ten times as much.
SMALL = 4 << 20
POLICY = SpecPrefillPolicy(threshold=0, densify=False)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A server waits for no collection either: cycles that hold arrays may live for minutes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Chat:
    """A conversation as clients send it: everything again, and something new."""

    def __init__(self, engine: Engine, start: int, seed: int, enabled: bool) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._options = SpecPrefillOptions(enabled)
        self._tokens: tuple[int, ...] = ()
        self._spans: tuple[PromptSpan, ...] = ()
        self._say(start)

    def turn(self) -> Finished:
        self._say(12)
        request = GenerationRequest(self._tokens, 4, spans=self._spans, specprefill=self._options)
        *events, last = self._engine.generate(request)
        assert isinstance(last, Finished)
        self._tokens += tuple(event.token for event in events if isinstance(event, TokenEvent))
        return last

    def _say(self, count: int) -> None:
        start = len(self._tokens)
        self._tokens += random_prompt(count, self._rng.randrange(1 << 30))
        end = len(self._tokens)
        self._spans += (PromptSpan("user", start, start + 2, end - 2, end),)


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(policy=POLICY, prefix_cache_bytes=256 << 20, **changes)


@pytest.mark.parametrize(
    ("enabled", "turns"),
    [(True, 12), *[pytest.param(enabled, 200, marks=pytest.mark.nightly) for enabled in (True, False)]],
)
def test_turns_leave_what_is_kept_and_nothing_else(uncollected: None, enabled: bool, turns: int) -> None:
    """The cache is far from full, so nothing of it is evicted."""
    with Engine(tiny_pair(), config()) as engine:
        before = unaccounted(engine)
        chat = Chat(engine, 400, 1, enabled)
        sparse = sum(chat.turn().report.mode == "sparse" for _ in range(turns))
        assert (sparse > turns // 2) == enabled
        assert unaccounted(engine) < before + SMALL
        engine.drop_cached()
        assert unaccounted(engine) < before + SMALL // 16
        assert engine.stats().memory.prefix_cache == 0


@pytest.mark.extended
@pytest.mark.nightly
def test_50_sessions_leave_what_is_kept(uncollected: None) -> None:
    with Engine(tiny_pair(), config()) as engine:
        before = unaccounted(engine)
        for seed in range(50):
            chat = Chat(engine, 200, seed, True)
            for _ in range(3):
                chat.turn()
        assert sum(entry.kind == "session" for entry in engine.cached()) >= 50
        assert unaccounted(engine) < before + SMALL
        engine.drop_cached()
        assert unaccounted(engine) < before + SMALL // 16


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Nothing is logged: pytest would keep it, and with it an exception's frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("speculative", ["off", "draft", "triforce"])
@pytest.mark.parametrize("how", ["length", "cancelled while reading", "cancelled while writing", "failed"])
@pytest.mark.extended
def test_an_idle_engine_holds_nothing_of_a_request_that_ended(
    uncollected: None, unlogged: None, monkeypatch: pytest.MonkeyPatch, speculative: SpeculationName, how: str
) -> None:
    options = SpecPrefillOptions(True, speculative=speculative)
    request = GenerationRequest(random_prompt(600), 40, specprefill=options, sampling=SamplingParams())
    with Engine(tiny_pair(), config(prefill_step=64)) as engine:
        started: list[weakref.ref[Any]] = []
        post = engine._inbox.post
        monkeypatch.setattr(engine._inbox, "post", lambda job: (started.append(weakref.ref(job.active)), post(job)))
        if how == "failed":
            monkeypatch.setattr(engine.rows, "add", raising)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        handle = engine.submit(request, events.put)
        seen = [events.get(timeout=60)]
        while not hasattr(seen[-1], "report"):
            if how == "cancelled while reading" or (how.endswith("writing") and isinstance(seen[-1], TokenEvent)):
                handle.cancel()
            seen.append(events.get(timeout=60))
        engine.drop_cached()  # after the engine's own steps, so that none is under way
        assert started[0]() is None


def raising(*_: Any) -> None:
    raise RuntimeError("of this test's making")


def test_freed_memory_goes_back_when_the_engine_is_idle() -> None:
    with Engine(tiny_pair(), config(memory_limit=1 << 30)) as engine:
        list(engine.generate(GenerationRequest(random_prompt(900), 8)))
        engine.drop_cached()
        assert eventually(lambda: engine.stats().memory.spare == 0)


def test_mlx_keeps_at_most_an_eighth_of_the_limit_and_its_own_limit_afterwards() -> None:
    own = mx.set_cache_limit(1 << 40)
    try:
        with Engine(tiny_pair(), config(memory_limit=1 << 30)) as engine:
            assert engine._inbox.call(lambda: mx.set_cache_limit(1 << 27)) == 1 << 27
        assert mx.set_cache_limit(1 << 20) == 1 << 40
        with Engine(tiny_pair(), config(memory_limit=1 << 30)) as engine:
            assert engine._inbox.call(lambda: mx.set_cache_limit(1 << 20)) == 1 << 20
    finally:
        mx.set_cache_limit(own)
