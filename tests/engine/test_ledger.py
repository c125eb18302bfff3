"""Every byte that MLX holds is somebody's: many turns, many sessions, and whatever ended how."""

from __future__ import annotations

import gc
import logging
import queue
import random
import weakref
from collections.abc import Iterator
from importlib.metadata import version
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
from mlx_specprefill.engine import leaks, loop
from mlx_specprefill.engine.leaks import TOLERATED, LeakDetector
from tests.engine.held import unaccounted
from tests.support.tiny import generated, random_prompt, tiny_pair
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


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.nightly
def test_200_turns_leave_what_is_kept_and_nothing_else(uncollected: None, enabled: bool) -> None:
    """The cache is far from full, so nothing of it is evicted."""
    with Engine(tiny_pair(), config()) as engine:
        before = unaccounted(engine)
        chat = Chat(engine, 400, 1, enabled)
        sparse = sum(chat.turn().report.mode == "sparse" for _ in range(200))
        assert (sparse > 100) == enabled
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


MIB = 1 << 20
HELD = {"weights": 70 * MIB, "requests": 30 * MIB}


def checks(*surplus: int, ended: bool = True) -> tuple[LeakDetector, list[str]]:
    """Check once for each surplus in MiB, each after the end of another request; what was logged."""
    detector, logged = LeakDetector(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    leaks.log.addHandler(handler)
    try:
        for number, more in enumerate(surplus, 1):
            detector.check(sum(HELD.values()) + more * MIB, HELD, number if ended else 1)
            assert detector.unaccounted == more * MIB
    finally:
        leaks.log.removeHandler(handler)
    return detector, logged


@pytest.mark.parametrize(
    ("surplus", "told"),
    [
        ((200, 200, 200, 200, 200), 0),  # held by other code of the process, from some time on
        ((0, 200, 0, 300, 0, 400, 0, 500), 0),  # it comes back each time
        ((40, 120, 60, 100, 140), 0),  # a smaller one between: it did not only grow
        ((40, 80, 100, 110), 0),  # twice
        ((40, 80, 120), 1),
        ((40, 39, 80, 79, 120), 1),  # some arrays less, as from step to step
        ((20, 40, 60, 80, 100, 120), 1),  # slowly, but on and on
        ((40, 80, 120, 160, 200), 1),
        ((40, 80, 120, 160, 200, 240), 2),
    ],
)
def test_a_surplus_is_told_when_it_has_grown_three_times_in_a_row(surplus: tuple[int, ...], told: int) -> None:
    assert len(checks(*surplus)[1]) == told


def test_the_warning_has_the_numbers_that_find_a_leak() -> None:
    (said,) = checks(40, 80, 120)[1]
    assert "40 MiB after 1 requests, 80 MiB after 2 requests, 120 MiB after 3 requests" in said
    assert f"MLX {version('mlx')} holds 220 MiB in all: weights 70 MiB, requests 30 MiB" in said


def test_growth_within_one_request_is_its_own() -> None:
    """A long prompt that comes from the disk grows from check to check."""
    assert checks(40, 80, 120, 160, 200, 240, ended=False)[1] == []


def test_a_prefill_in_work_may_need_more(caplog: pytest.LogCaptureFixture) -> None:
    detector = LeakDetector()
    with caplog.at_level(logging.WARNING, leaks.__name__):
        for ended, more in enumerate((40, 80, 120, 160), 1):
            detector.check(more * MIB, {}, ended, working_set=200 * MIB)
        detector.check(-5, {"shared by two": 100}, 9)
    assert detector.unaccounted == 0
    assert not caplog.records


def test_the_engine_tells_of_arrays_that_are_nobodys(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three requests leaves an array; those of one are not told of."""
    monkeypatch.setattr(loop, "_LOOK_EVERY_S", 0.0)
    with Engine(tiny_pair(), config()) as engine, caplog.at_level(logging.WARNING, leaks.__name__):
        before = engine.stats().memory.active
        foreign: list[mx.array] = []
        while len(foreign) < 3:
            assert len(foreign) > 1 or not caplog.records  # what earlier tests hold may count as the first
            foreign.append(mx.zeros((2 * TOLERATED + before,), dtype=mx.uint8) + 1)
            mx.eval(foreign)
            for seed in (1, 2, 3):  # the first may have been looked at before
                generated(engine.generate(GenerationRequest(random_prompt(9, 3 * len(foreign) + seed), 2)))
        assert eventually(lambda: bool(caplog.records))
        del foreign
        assert eventually(lambda: engine.stats().memory.unaccounted_bytes <= before)
    assert len(caplog.records) == 1


@pytest.mark.extended
def test_decoding_rows_are_accounted_for(uncollected: None) -> None:
    """In a batch and by proposals, at any moment."""
    most: list[int] = []
    with Engine(tiny_pair(), config()) as engine:
        before, balance = unaccounted(engine), engine.memory.check

        def look(event: Event) -> None:
            if isinstance(event, TokenEvent):
                balance()
                most.append(engine.stats().memory.unaccounted_bytes - before)
            events.put(event)

        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        for seed in range(8):
            options = SpecPrefillOptions(False, speculative="draft" if seed == 7 else "off")
            request = GenerationRequest(random_prompt(600 + seed, seed), 20, specprefill=options)
            engine.submit(request, look)
        ended = 0
        while ended < 8:
            ended += isinstance(events.get(timeout=60), Finished)
    assert max(most) < SMALL // 4


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
