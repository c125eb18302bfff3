"""Which sparse turn is made dense first, on integers and with a tiny engine."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Generator, Sequence
from fractions import Fraction
from typing import Any

import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    Progress,
    RequestHandle,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenIds,
)
from mlx_specprefill.engine.reading.densify import densify
from mlx_specprefill.engine.reading.prefill import Prefiller
from mlx_specprefill.engine.thread import background, loop
from mlx_specprefill.engine.thread.background import BackgroundQueue, IdleTurn
from tests.support.steps import finish
from tests.support.tiny import VOCAB, generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=200, keep_pct=Fraction(3, 10)), prefill_step=128, prefix_cache_bytes=64 << 20
)
SPARSE = SpecPrefillOptions(enabled=True)
LENGTH = 500


def turn(*prompt: int, expecting: bool = False, answer: tuple[int, ...] = (0,)) -> IdleTurn:
    handle = RequestHandle()
    if expecting:
        handle.expect_more()
    return IdleTurn(GenerationRequest(prompt, 1), answer, handle)


def drained(turns: Sequence[IdleTurn]) -> list[tuple[int, ...]]:
    queue, order = BackgroundQueue(lambda turn: turn.handle.expecting), []
    for one in turns:
        queue.add(one)
    while (first := queue.first()) is not None:
        order.append(tuple(first.request.prompt.tolist()))
        queue.discard(first)
    assert not len(queue)
    return order


def test_outstanding_calls_come_first_and_the_newest_among_equals() -> None:
    turns = [turn(1, expecting=True), turn(2), turn(3, expecting=True), turn(4)]
    assert drained(turns) == [(3,), (1,), (4,), (2,)]


def test_a_call_may_become_known_later() -> None:
    queue, old = BackgroundQueue(lambda turn: turn.handle.expecting), turn(1)
    queue.add(old)
    queue.add(turn(2))
    first = queue.first()
    assert first is not None
    assert list(first.request.prompt) == [2]
    old.handle.expect_more()
    assert queue.first() is old


def test_a_conversation_is_there_once_with_its_newest_turn() -> None:
    """Whatever became of the answer in the next prompt, and whether or not a call was outstanding before."""
    assert drained([turn(1, 2, expecting=True), turn(7), turn(1, 2, 9, 3)]) == [(1, 2, 9, 3), (7,)]
    assert drained([turn(1, 2, answer=(5,)), turn(1, 2, answer=(6,))]) == [(1, 2)]


def test_another_label_is_another_conversation() -> None:
    one, other = CacheLabel("one"), CacheLabel("other")
    turns = [
        IdleTurn(GenerationRequest((1, 2), 1, label=one), (0,), RequestHandle()),
        IdleTurn(GenerationRequest((1, 2, 3), 1, label=other), (0,), RequestHandle()),
    ]
    assert drained(turns) == [(1, 2, 3), (1, 2)]


def test_the_least_urgent_turn_goes_when_there_are_too_many() -> None:
    waiting, rest = turn(0, expecting=True), [turn(i) for i in range(1, 10)]
    assert drained([waiting, *rest]) == [(0,), *((i,) for i in range(9, 2, -1))]


def ask(engine: Engine, prompt: tuple[int, ...]) -> RequestHandle:
    """One sparse turn."""
    ended = threading.Event()
    handle = engine.submit(
        GenerationRequest(prompt, 3, specprefill=SPARSE),
        lambda event: ended.set() if isinstance(event, Finished) else None,
    )
    assert ended.wait(60)
    return handle


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Background work waits until this is called, however long a test takes to get there."""
    monkeypatch.setattr(loop.EngineCore, "_quiet_s", math.inf)
    return lambda: monkeypatch.setattr(loop.EngineCore, "_quiet_s", 0.0)


def watch(engine: Engine, patch: pytest.MonkeyPatch) -> list[tuple[TokenIds, int]]:
    """Record each background prefill at its start: the prompt, and how much of it is dense by then."""
    taken: list[tuple[TokenIds, int]] = []

    def watched(prefiller: Prefiller, request: GenerationRequest) -> Generator[Any, None, None]:
        hit = finish(engine.caches.target_prefix(request.prompt, request.label))
        taken.append((request.prompt[:LENGTH], 0 if hit is None else hit.length))
        return densify(prefiller, request)

    patch.setattr(background, "densify", watched)
    return taken


def test_the_engine_takes_the_turn_with_a_call_first(
    monkeypatch: pytest.MonkeyPatch, release: Callable[[], None]
) -> None:
    prompts = [random_prompt(LENGTH, seed) for seed in range(3)]
    with Engine(tiny_pair(), CONFIG) as engine:
        taken = watch(engine, monkeypatch)
        handles = [ask(engine, prompt) for prompt in prompts]
        handles[1].expect_more()
        release()
        assert eventually(lambda: engine.stats().densified == 3, 60)
    assert [tuple(prompt.tolist()) for prompt, _ in taken] == [prompts[1], prompts[2], prompts[0]]


def test_what_runs_gives_way_to_a_call_and_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, release: Callable[[], None]
) -> None:
    """The call of the older turn becomes known while the newer one is being made dense."""
    prompts, slices = [random_prompt(LENGTH, seed) for seed in range(2)], []
    with Engine(tiny_pair(), dataclasses.replace(CONFIG, target_itl_ms=0.01)) as engine:  # one slice per tick
        taken = watch(engine, monkeypatch)
        handles = [ask(engine, prompt) for prompt in prompts]

        def size(kind: str) -> int:
            if taken:
                slices.append(kind)
            if len(slices) == 3:
                handles[0].expect_more()
            return 64

        monkeypatch.setattr(engine.prefiller, "step", lambda: size("prefill"))
        monkeypatch.setattr(engine.prefiller.scorer, "step", lambda: size("draft"))
        release()
        assert eventually(lambda: engine.stats().densified == 2, 60)
        _, last = generated(engine.generate(GenerationRequest((*prompts[1], 2, 3), 2)))
    assert [tuple(prompt.tolist()) for prompt, _ in taken] == [prompts[1], prompts[0], prompts[1]]
    assert taken[2][1] >= taken[0][1] + 3 * 64
    assert isinstance(last, Finished)
    assert last.report.cached_tokens >= LENGTH


# --- its memory ------------------------------------------------------------------------------------------------------


def endless(engine: Engine, patch: pytest.MonkeyPatch) -> list[str]:
    """From now on making a turn dense goes on until it is stopped; what happened, in order.

    The draft reads nothing: what is stored of it would evict something where there is no room.
    """
    seen: list[str] = []

    def dense(_: Prefiller, request: GenerationRequest) -> Generator[Any, None, None]:
        seen.append("began")
        try:
            while True:
                yield Progress("prefill", 0, len(request.prompt))
        finally:
            seen.append("stopped")

    patch.setattr(background, "densify", dense)
    patch.setattr(engine.densifier, "_drafts", False)
    return seen


def limited(engine: Engine, nbytes: int) -> None:
    """Leave that many bytes beside the weights and what the caches hold now."""
    memory = engine.memory
    memory.limit = memory.weights + engine.caches.nbytes + nbytes


def test_what_is_made_dense_is_counted_and_gives_its_memory_to_a_request(
    monkeypatch: pytest.MonkeyPatch, release: Callable[[], None]
) -> None:
    """Both would not fit. The request runs, evicts nothing, and the turn keeps its place.

    Its answer is shorter than it may be, so what is kept of it leaves the turn its room.
    """
    off = SpecPrefillOptions(False)  # else the draft would read it afterwards
    request = GenerationRequest(random_prompt(100, 9), 40, specprefill=off, stop_token_ids=frozenset(range(VOCAB)))
    with Engine(tiny_pair(), CONFIG) as engine:
        seen = endless(engine, monkeypatch)
        ask(engine, random_prompt(LENGTH))
        need = engine.memory.need_idle(LENGTH + 3, dense=True)
        limited(engine, need.total + engine.memory.need(request, "full").held - 1)
        release()
        assert eventually(lambda: seen == ["began"])
        assert engine.stats().memory.reserved == need.total
        evictions = engine.stats().evictions
        _, last = generated(engine.generate(request))
        assert seen[:2] == ["began", "stopped"]
        assert engine.stats().evictions == evictions
        assert eventually(lambda: seen == ["began", "stopped", "began"])
    assert isinstance(last, Finished)
    assert seen[-1] == "stopped"
    assert engine.stats().memory.reserved == 0


def test_what_does_not_fit_is_left_sparse_and_nothing_is_evicted(
    monkeypatch: pytest.MonkeyPatch, release: Callable[[], None]
) -> None:
    with Engine(tiny_pair(), CONFIG) as engine:
        seen = endless(engine, monkeypatch)
        ask(engine, random_prompt(LENGTH))
        limited(engine, engine.memory.need_idle(LENGTH + 3, dense=True).total - 1)
        evictions = engine.stats().evictions
        release()
        assert eventually(lambda: not engine.densifier.turns)
        assert engine.stats().evictions == evictions
        assert engine.health().alive
    assert seen == []


# --- the room for prefixes -------------------------------------------------------------------------------------------

TURN = 900  # tokens: four blocks
BUDGETS = [0.3, 0.45, 0.8, 1.0, 1.2, 3.0]  # times the dense prefixes of both models


def found_by_the_next_turn(family: str, share: float, densify: bool) -> int:
    """Return the cached tokens of a second turn, after idle time."""
    policy = dataclasses.replace(CONFIG.policy, densify=densify)
    with Engine(tiny_pair(family), dataclasses.replace(CONFIG, policy=policy)) as engine:
        memory = engine.memory
        engine.caches.budget.most = int(share * sum(memory.need_idle(TURN, dense).held for dense in (True, False)))
        prompt = random_prompt(TURN)
        answer, _ = generated(engine.generate(GenerationRequest(prompt, 8)))
        engine.cached()  # the turn has ended, and is queued
        assert eventually(lambda: not engine.densifier.turns and not engine.health().background, 60)
        following = GenerationRequest((*prompt, *answer, *random_prompt(300, 7)), 2)
        _, last = generated(engine.generate(following))
    assert isinstance(last, Finished)
    return last.report.cached_tokens


@pytest.mark.parametrize("share", [0.6, *(pytest.param(share, marks=pytest.mark.nightly) for share in BUDGETS)])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_idle_work_never_costs_the_next_turn_what_it_would_find(
    family: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.EngineCore, "_quiet_s", 0.0)
    assert found_by_the_next_turn(family, share, True) >= found_by_the_next_turn(family, share, False)


@pytest.mark.parametrize(("share", "made"), [(0.3, 0), (0.8, 0), (3.0, 1)])
def test_a_turn_whose_dense_prefix_has_no_room_is_not_made_dense(
    share: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With .8 there is room for it alone, but not beside the session that it is to replace."""
    monkeypatch.setattr(loop.EngineCore, "_quiet_s", 0.0)
    with Engine(tiny_pair(), CONFIG) as engine:
        memory = engine.memory
        engine.caches.budget.most = int(share * sum(memory.need_idle(TURN, dense).held for dense in (True, False)))
        generated(engine.generate(GenerationRequest(random_prompt(TURN), 8)))
        engine.cached()  # the turn has ended, and is queued
        assert eventually(lambda: not engine.densifier.turns and not engine.health().background, 60)
        assert engine.stats().densified == made


def test_a_prompt_without_room_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(tiny_pair(), dataclasses.replace(CONFIG, prefix_cache_bytes=200_000)) as engine:
        generated(engine.generate(GenerationRequest(random_prompt(100), 2)))
        assert "can't all be kept" not in caplog.text
        generated(engine.generate(GenerationRequest(random_prompt(TURN), 2)))
        engine.cached()
    assert [text for text in caplog.messages if "can't all be kept" in text] == [
        "900 tokens can't all be kept in the prefix cache of 0 MB, and are read again: --prefix-cache-size allows more"
    ]
