"""What the server's threads read while the MLX thread changes it: plans, health, counts."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from mlx_specprefill.config import EngineConfig
from mlx_specprefill.engine.handle import RequestHandle
from mlx_specprefill.engine.inbox import Inbox
from mlx_specprefill.engine.jobs import Job, nobody
from mlx_specprefill.engine.scheduler import Scheduler, SliceSizer
from mlx_specprefill.engine.slicing import Slicing
from mlx_specprefill.request import Progress

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
    """From the queue to the answer every request is in `waiting` or `running`, or for a moment in both."""
    scheduler = Scheduler()
    inbox = Inbox(scheduler, 8)
    inbox.open()
    for uid in range(4):
        scheduler.add(uid)
    counts: list[int] = []

    def step(number: int) -> None:
        uid, background = number % 4, number + 4
        scheduler.admit(uid)
        scheduler.add_background(background)
        scheduler.to_decode(uid)
        scheduler.add(number + 5)  # what comes in before this one goes, under a uid of its own
        scheduler.remove(background)
        scheduler.remove(number + 5)
        scheduler.remove(uid)
        scheduler.add(uid)

    def read() -> None:
        waiting = inbox.waiting
        counts.append(waiting + scheduler.running)

    meanwhile(step, read)
    assert min(counts) >= 3  # all but the one that is between `remove` and `add`


def test_sizes_are_told_while_slices_are_timed() -> None:
    sizer = SliceSizer(4096)
    meanwhile(
        lambda number: sizer.observe("draft", 64 + number % 64, 50.0, number % 999), lambda: sizer.size("draft", True)
    )


def test_a_kind_is_known_only_once_it_has_a_speed() -> None:
    """The first slice of a kind can end while a plan asks for its size."""
    sizers = [SliceSizer(4096)]

    def step(number: int) -> None:
        sizers[0].observe("draft", 64, 50.0)
        sizers[0] = SliceSizer(4096)

    meanwhile(step, lambda: sizers[0].size("draft", True))


def test_a_plan_does_not_touch_the_slice_that_runs() -> None:
    config = EngineConfig(prefill_step=2048)
    scheduler = Scheduler()
    scheduler.add(1)
    scheduler.admit(1)

    def no_slices() -> Iterator[None]:
        yield None

    job = Job(1, nobody, RequestHandle(), no_slices())  # type: ignore[arg-type]
    slicing = Slicing(config, scheduler, lambda kind: 2048 if kind == "draft" else 64)
    slicing.begin(job)
    given = slicing.size("draft")
    assert slicing.expected("prefill") == 64
    job.slice_s = 2.0
    slicing.account(job, Progress("draft", given, 4096))
    assert slicing.expected("draft") < given  # the slice was timed, and it was too slow
