"""Several engines on one MLX thread: whose turn it is, what they hold together, and that none touches another."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    Engine,
    EngineClosedError,
    EngineConfig,
    Finished,
    GenerationRequest,
    MLXThread,
    RequestCancelled,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.engine.memory.shared import SharedMemory
from mlx_specprefill.engine.thread import mlx_thread
from mlx_specprefill.engine.thread.mlx_thread import _Member
from tests.support.tiny import failed, generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=10_000, densify=False), prefill_step=64)


# --- turns -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Ticks:
    """A loop whose ticks take so many milliseconds by the clock, and who ran when."""

    name: str
    ms: int
    clock: list[float]
    log: list[str]
    busy: bool = True
    answering: bool = False
    stuck: bool = False
    has_ended: bool = False
    beat: float = 0.0
    rest_s: float = 0.5
    told: list[tuple[bool, bool]] = field(default_factory=list)

    def step(self, background: bool = True, elsewhere: bool = False) -> None:
        self.told.append((background, elsewhere))
        if self.busy:
            self.log.append(self.name)
            self.clock[0] += self.ms / 1e3

    def end(self) -> None:
        self.log.append(f"{self.name} ended")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> tuple[MLXThread, Callable[..., Ticks], list[str]]:
    clock, log = [0.0], list[str]()
    now = SimpleNamespace(perf_counter=lambda: clock[0], monotonic=lambda: clock[0])
    monkeypatch.setattr(mlx_thread, "time", now)
    thread = MLXThread()

    def add(name: str, ms: int, **given: Any) -> Ticks:
        loop = Ticks(name, ms, clock, log, **given)
        thread._members.append(_Member(loop))
        return loop

    return thread, add, log


def test_engines_get_equal_time_not_equal_turns(turns: Any) -> None:
    thread, add, log = turns
    add("short", 10), add("long", 200)
    for _ in range(420):
        thread._turn()
    assert abs(10 * log.count("short") - 200 * log.count("long")) <= 400


def test_who_had_nothing_to_do_does_not_make_up_for_it(turns: Any) -> None:
    thread, add, log = turns
    add("steady", 10)
    late = add("late", 10, busy=False)
    for _ in range(100):
        thread._turn()
    late.busy = True
    log.clear()
    for _ in range(20):
        thread._turn()
    assert abs(log.count("steady") - log.count("late")) <= 1


def test_background_work_is_begun_only_when_no_engine_has_requests(turns: Any) -> None:
    thread, add, _ = turns
    busy, idle = add("busy", 600), add("idle", 1, busy=False)
    for _ in range(3):
        assert thread._turn()
    assert idle.told
    assert not any(background for background, _ in (*idle.told, *busy.told))
    busy.busy = False
    assert not thread._turn()
    thread._idle()
    assert idle.told[-1] == busy.told[-1] == (True, False)


def test_slices_know_of_answers_elsewhere(turns: Any) -> None:
    thread, add, _ = turns
    answers = add("answers", 10, answering=True)
    reads = add("reads", 10)
    for _ in range(4):
        thread._turn()
    assert {elsewhere for _, elsewhere in reads.told} == {True}
    assert {elsewhere for _, elsewhere in answers.told} == {False}


def test_a_loop_that_is_over_ends_and_the_others_go_on(turns: Any) -> None:
    thread, add, log = turns
    over = add("over", 10)
    add("on", 10)
    over.has_ended = True
    assert thread._turn()
    assert log == ["over ended", "on"]


def test_a_pause_gives_the_engines_as_much_time_as_the_call_had(turns: Any) -> None:
    thread, add, log = turns
    loop = add("asks", 30)
    thread._open = True
    loop.clock[0] = 0.29  # so long has the call run
    thread.pause()
    assert log == ["asks"] * 10
    thread.pause()
    assert log == ["asks"] * 11  # at least one tick, though the call has done nothing since


def test_a_pause_of_a_call_on_a_closing_thread_ends_it(turns: Any) -> None:
    with pytest.raises(RequestCancelled):
        turns[0].pause()


def test_calls_run_on_the_thread_and_their_errors_are_their_callers() -> None:
    with MLXThread() as thread:
        assert thread.call(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            thread.call(lambda: 1 // 0)
        assert thread.is_alive
    assert not thread.is_alive
    with pytest.raises(EngineClosedError):
        thread.call(int)
    with pytest.raises(EngineClosedError):
        thread.start()


# --- engines ---------------------------------------------------------------------------------------------------------


def requests() -> Iterator[GenerationRequest]:
    for number, length in enumerate((40, 300, 90, 700, 20, 500)):
        sparse = SpecPrefillOptions(number % 2 == 1, Fraction(3, 10))
        yield GenerationRequest(random_prompt(length, number), 12, specprefill=sparse)


def answers(engine: Engine, at_once: bool) -> list[list[int]]:
    """Return the answers to all requests, in their order."""
    if not at_once:
        return [generated(engine.generate(request))[0] for request in requests()]
    found: dict[int, list[int]] = {}

    def ask(number: int, request: GenerationRequest) -> None:
        found[number] = generated(engine.generate(request))[0]

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(requests())]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return [found[number] for number in range(len(threads))]


FAMILIES = ("llama", "qwen3", "qwen3_5")


@pytest.mark.extended
def test_engines_that_share_a_thread_answer_as_alone() -> None:
    alone = []
    for family in FAMILIES:
        with Engine(tiny_pair(family), CONFIG) as engine:
            alone.append(answers(engine, at_once=False))
    with MLXThread() as thread:
        engines = [Engine(tiny_pair(family), CONFIG, thread=thread) for family in FAMILIES]
        for engine in engines:
            engine.start()
        found: dict[int, list[list[int]]] = {}
        askers = [
            threading.Thread(target=lambda n=n, e=e: found.update({n: answers(e, at_once=True)}))
            for n, e in enumerate(engines)
        ]
        for one in askers:
            one.start()
        for one in askers:
            one.join()
        for engine in engines:
            engine.close()
    assert [found[number] for number in range(len(FAMILIES))] == alone


@pytest.mark.extended
def test_an_engine_that_closes_leaves_nothing_and_the_others_go_on() -> None:
    with MLXThread(1 << 40) as thread:
        stays = Engine(tiny_pair("qwen3"), CONFIG, thread=thread)
        stays.start()
        expected = answers(stays, at_once=False)
        thread.release()
        before = mx.get_active_memory()
        goes = Engine(tiny_pair.__wrapped__("llama"), CONFIG, thread=thread)  # a pair that no other test shares
        goes.start()
        answers(goes, at_once=True)
        assert mx.get_active_memory() > before
        goes.close()
        assert not goes.health().alive
        with pytest.raises(EngineClosedError):
            next(goes.generate(next(requests())))
        gone = [weakref.ref(goes), weakref.ref(goes.pair.target), weakref.ref(goes.loop)]
        del goes
        thread.release()
        assert [one() for one in gone] == [None] * 3
        assert mx.get_active_memory() <= before
        assert stays.health().alive
        stays.drop_cached()
        assert answers(stays, at_once=True) == expected
        stays.close()


def test_a_thread_that_closes_ends_its_engines() -> None:
    thread = MLXThread()
    thread.start()
    engine = Engine(tiny_pair(), CONFIG, thread=thread)
    engine.start()
    events = engine.generate(GenerationRequest(random_prompt(20), 4000))
    next(events)
    thread.close()
    *_, last = events
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    with pytest.raises(EngineClosedError):
        next(engine.generate(next(requests())))
    engine.close()


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """An engine as the common memory sees it."""

    parameters: dict[int, int]
    reserved: int = 0
    cached: int = 0
    pinned: bool = False
    last_use: float = 0.0
    background: bool = True
    idle: int = 0

    @property
    def reclaimable(self) -> int:
        return self.cached + self.idle

    def stop_background(self) -> None:
        self.background = False

    def evict(self, nbytes: int) -> None:
        self.cached -= min(nbytes, self.cached)


def common(*parts: Part, limit: int = 1000) -> SharedMemory:
    memory = SharedMemory(limit)
    for part in parts:
        memory.join(part)
    return memory


def test_a_draft_of_two_models_counts_once() -> None:
    memory = common(Part({1: 300, 9: 50}), Part({2: 200, 9: 50}))
    assert memory.weights() == 550
    assert memory.missing(450) == 0
    assert memory.missing(451) == 1


def test_the_cache_of_the_model_that_was_used_least_recently_goes_first_and_ones_own_last() -> None:
    old, new, own = (Part({n: 100}, cached=200, last_use=float(n)) for n in range(3))
    memory = common(new, own, old)
    memory.reclaim(300, own)
    assert [part.cached for part in (old, new, own)] == [0, 200, 200]
    memory.reclaim(650, own)
    assert [part.cached for part in (old, new, own)] == [0, 0, 50]
    assert not old.background
    assert not new.background
    assert own.background


def test_prefixes_of_an_engine_have_what_all_others_leave() -> None:
    own, other = Part({1: 100}, cached=200), Part({2: 150}, cached=100, reserved=250)
    memory = common(own, other)
    assert memory.room_for_prefixes(own) == 400
    memory.loading = 150
    assert memory.room_for_prefixes(own) == 250
    assert common(own).room_for_prefixes(own) == math.inf  # its own limit decides


def test_every_request_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the one before waited in vain, or was cancelled while it waited."""
    own, other = Part({1: 100}), Part({2: 700})
    memory, asked, now = common(own, other), list[int](), [0.0]
    memory.on_pressure = asked.append
    monkeypatch.setattr("mlx_specprefill.engine.memory.shared.time.monotonic", lambda: now[0])
    for uid in range(3):
        assert memory.can_be_freed(500 + uid, own, uid)
        now[0] += 9.9
        assert memory.can_be_freed(500 + uid, own, uid)
        if uid < 2:
            now[0] += 0.2
            assert not memory.can_be_freed(500 + uid, own, uid)
        memory.forget(own, uid)
    assert asked == [500, 501, 502]
    assert not memory._waiting_since


def limit_of(*engines: Engine, requests: int) -> int:
    """Room for the weights of all, and for so many bytes of requests."""
    return sum(engine.memory.weights for engine in engines) + requests


def test_another_engines_prefixes_give_way_to_a_request() -> None:
    with MLXThread(1 << 40) as thread:
        idle, busy = (Engine(tiny_pair(family), CONFIG, thread=thread) for family in ("llama", "qwen3"))
        idle.start(), busy.start()
        list(idle.generate(GenerationRequest(random_prompt(900), 2)))
        held = idle.stats().memory.prefix_cache
        assert held > 0
        request = GenerationRequest(random_prompt(600, 3), 8)
        need = busy.memory.need(request, "full").total
        thread.memory.limit = limit_of(idle, busy, requests=need + held // 2)
        generated(busy.generate(request))
        assert idle.stats().memory.prefix_cache < held
        idle.close(), busy.close()


def test_a_request_waits_for_memory_that_another_engines_request_holds() -> None:
    with MLXThread(1 << 40) as thread:
        first, second = (Engine(tiny_pair(family), CONFIG, thread=thread) for family in ("llama", "qwen3"))
        first.start(), second.start()
        request = GenerationRequest(random_prompt(600, 3), 2)
        long = GenerationRequest(random_prompt(8), 1200)
        needs = first.memory.need(long, "full").total, second.memory.need(request, "full").total
        thread.memory.limit = limit_of(first, second, requests=max(needs))
        holds = first.generate(long)
        next(holds)
        assert eventually(lambda: first.stats().memory.reserved > 0)
        ended = list[Any]()
        waits = threading.Thread(target=lambda: ended.extend(second.generate(request)))
        waits.start()
        assert eventually(lambda: second.loop.stuck)
        holds.close()
        waits.join(60)
        assert isinstance(ended[-1], Finished)
        first.close(), second.close()


def test_a_request_for_which_nothing_gives_way_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with MLXThread(1 << 40) as thread:
        models = (Engine(tiny_pair(family), CONFIG, thread=thread) for family in ("llama", "qwen3"))
        own, other = models
        own.start(), other.start()
        request = GenerationRequest(random_prompt(600, 3), 2)
        thread.memory.limit = limit_of(own, other, requests=own.memory.need(request, "full").total - 1)
        assert "not enough memory" in str(failed(own.generate(request)).error)
        asked = list[int]()
        thread.memory.on_pressure = asked.append
        with monkeypatch.context() as patch:
            patch.setattr("mlx_specprefill.engine.memory.shared._PATIENCE_S", 0.05)
            for count in (1, 2):
                failed(own.generate(request))
                assert len(asked) == count
        ended = list[Any]()
        waits = threading.Thread(target=lambda: ended.extend(own.generate(request)))
        waits.start()
        assert eventually(lambda: len(asked) == 3)
        other.close()  # as whoever was asked may do
        waits.join(60)
        assert isinstance(ended[-1], Finished)
        own.close()
        gc.collect()
