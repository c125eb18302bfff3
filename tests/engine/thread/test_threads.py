"""Values that the server's threads read while the MLX thread changes them: plans, health, counts."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_specprefill.config import EngineConfig
from mlx_specprefill.engine.engine import Engine
from mlx_specprefill.engine.reading.chunks import ChunkSizer
from mlx_specprefill.engine.reading.costs import CostModel
from mlx_specprefill.engine.requests.job import Job
from mlx_specprefill.engine.requests.scheduler import Scheduler
from mlx_specprefill.events import Progress
from tests.support.tiny import tiny_pair

READS = 200_000


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def meanwhile(step: Callable[[int], object], read: Callable[[], object]) -> None:
    """`read` again and again while another thread takes one `step` after another."""
    stop = threading.Event()

    def work() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            step(number)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(READS):
            read()
    finally:
        stop.set()
        worker.join()


def test_requests_are_counted_while_they_come_and_go() -> None:
    scheduler = Scheduler()

    def step(number: int) -> None:
        scheduler.add(number)
        scheduler.admit(number)
        scheduler.to_decode(number)
        scheduler.remove(number)

    meanwhile(step, lambda: scheduler.running)


class Checked(dict[int, Any]):
    """The queue of a scheduler, which looks where a request is when it leaves."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler._waiting)
        self._scheduler = scheduler

    def __delitem__(self, uid: int) -> None:
        assert self._scheduler.running == 1
        super().__delitem__(uid)


def test_a_request_that_is_admitted_is_never_nowhere() -> None:
    scheduler = Scheduler()
    scheduler.add(1)
    scheduler._waiting = Checked(scheduler)
    scheduler.admit(1)
    assert (scheduler.waiting, scheduler.running) == (0, 1)


def test_a_request_that_is_admitted_meanwhile_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_pair())
    engine.scheduler.add(1)
    running = Scheduler.running

    def and_then_it_is_admitted(scheduler: Scheduler) -> int:
        count: int = running.fget(scheduler)  # type: ignore[attr-defined]
        if scheduler.waiting:
            scheduler.admit(1)
        return count

    monkeypatch.setattr(Scheduler, "running", property(and_then_it_is_admitted))
    health = engine.health()
    assert health.running + health.queued == 1


@pytest.mark.extended
def test_sizes_are_asked_for_while_chunks_are_timed() -> None:
    costs = CostModel(tiny_pair(), EngineConfig())
    scheduler = Scheduler()
    sizer = ChunkSizer(tiny_pair(), EngineConfig(prefill_step=2048), scheduler, costs)
    scheduler.add(1)
    scheduler.admit(1)
    scheduler.to_decode(1)
    meanwhile(
        lambda number: costs.observe("target", 64 + number % 64, number % 999, 50.0),
        lambda: sizer.expected_tokens("prefill"),
    )


def test_a_plan_does_not_touch_the_chunk_that_runs() -> None:
    scheduler, costs = Scheduler(), CostModel(tiny_pair(), EngineConfig())
    for uid in (1, 2):
        scheduler.add(uid)
        scheduler.admit(uid)
    scheduler.to_decode(2)
    job = Job(1, iter(()))
    sizer = ChunkSizer(tiny_pair(), EngineConfig(prefill_step=2048), scheduler, costs)
    sizer.begin(job)
    given = sizer.size("draft")
    before = sizer.expected_tokens("draft")
    sizer.expected_tokens("prefill")
    job.step_s = 2.0
    sizer.observe(job, Progress("draft", given, 4096))
    assert costs.cost("draft").ms(given) == pytest.approx(2000.0, rel=0.01)
    assert sizer.expected_tokens("draft") <= before  # the chunk was timed, and it was too slow
