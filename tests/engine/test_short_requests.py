"""Short requests beside many long ones, on a running engine. Chunks are counted, not seconds."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.engine.requests.job import Need
from tests.support.tiny import random_prompt, tiny_pair

ROWS, LONG = 4, 12
DENSE = SpecPrefillOptions(False)


class Watch:
    """The calls of an engine's scheduler: requests that joined, chunks that read something, requests that ended."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[str, int]] = []
        scheduler = engine.scheduler
        add, served, to_decode = scheduler.add, scheduler.record, scheduler.to_decode

        left: dict[int, int] = {}

        def watched_served(uid: int, now_left: int | None, ms: int) -> None:
            if now_left is not None and now_left < left.setdefault(uid, now_left):
                self.told.append(("chunk", uid))
                left[uid] = now_left
            served(uid, now_left, ms)

        monkeypatch.setattr(
            scheduler, "add", lambda uid, left=1 << 30: (self.told.append(("joined", uid)), add(uid, left))
        )
        monkeypatch.setattr(scheduler, "record", watched_served)
        monkeypatch.setattr(scheduler, "to_decode", lambda uid: (self.told.append(("read", uid)), to_decode(uid)))

    def others_before(self, uid: int) -> int:
        """Count the chunks of others between a request's arrival and its first token."""
        told = self.told[self.told.index(("joined", uid)) : self.told.index(("read", uid))]
        return sum(what == "chunk" and whose != uid for what, whose in told)


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(
        policy=SpecPrefillPolicy(threshold=10_000, densify=False), max_rows=ROWS, prefill_step=64, target_itl_ms=1
    )
    with Engine(tiny_pair(), config) as running:
        yield running


def busy(engine: Engine) -> list[queue.SimpleQueue[Event]]:
    """With more long requests than rows; the first has begun."""
    ends = []
    for seed in range(LONG):
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        engine.submit(GenerationRequest(random_prompt(3500, seed), 2, specprefill=DENSE), events.put)
        ends.append(events)
    for _ in range(3):
        ends[0].get(timeout=60)
    return ends


def ask(engine: Engine, prompt: tuple[int, ...], tokens: int = 2) -> Finished:
    *_, last = engine.generate(GenerationRequest(prompt, tokens, specprefill=DENSE))
    assert isinstance(last, Finished)
    return last


@pytest.mark.extended
def test_a_short_request_waits_for_two_chunks_of_others_and_for_no_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, ends = Watch(engine, monkeypatch), busy(engine)
    for seed in range(15):
        ask(engine, random_prompt(20, seed))
    assert engine.stats().waiting >= LONG - ROWS
    assert [watch.others_before(LONG + 1 + n) for n in range(15)] == pytest.approx([0] * 15, abs=2)
    for events in ends[:1]:  # and the long ones go on
        while not isinstance(events.get(timeout=120), Finished):
            pass


def test_the_next_turn_of_a_conversation_is_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its uncached part counts, not its length."""
    conversation = random_prompt(2000, 99)
    ask(engine, conversation)
    watch = Watch(engine, monkeypatch)
    busy(engine)
    last = ask(engine, (*conversation, *random_prompt(20, 5)))
    assert last.report.cached_tokens == 2000
    assert watch.others_before(LONG + 2) <= 2


@pytest.mark.extended
def test_a_short_request_does_not_wait_for_the_memory_of_a_long_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long one in line needs more than is free; the short one does not."""
    monkeypatch.setattr(engine.memory, "need", lambda request, mode: Need(len(request.prompt)))
    monkeypatch.setattr(engine.memory, "limit", 6000 + engine.memory.weights)
    ends = busy(engine)
    assert engine.stats().waiting >= LONG - 1
    ask(engine, random_prompt(20, 1))
    assert engine.stats().waiting >= LONG - 2
    for events in ends[:2]:
        while not isinstance(events.get(timeout=120), Finished):
            pass


@pytest.mark.extended
def test_a_prompt_of_several_chunks_does_not_wait_for_the_places_of_much_longer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A ninth of their length."""
    config = EngineConfig(
        policy=SpecPrefillPolicy(threshold=10_000, densify=False), max_rows=8, prefill_step=64, target_itl_ms=1
    )
    with Engine(tiny_pair(), config) as engine:
        watch, ends = Watch(engine, monkeypatch), busy(engine)
        for seed in range(5):
            ask(engine, random_prompt(400, seed))
        assert engine.stats().waiting >= LONG - 8
        assert max(watch.others_before(LONG + 1 + n) for n in range(5)) <= 8
        assert ends[0].qsize() > 0  # and the oldest goes on
