"""The way to the MLX thread, and what it carries; no models."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import pytest

from mlx_specprefill import EngineClosedError, Progress, RequestCancelled
from mlx_specprefill.engine.requests.failures import strip_traceback
from mlx_specprefill.engine.requests.job import Job
from mlx_specprefill.engine.requests.scheduler import Scheduler
from mlx_specprefill.engine.thread.inbox import Call, Inbox, Results


def work(*events: Any) -> Generator[Any, None, str]:
    yield from events
    return "done"


def job(uid: int, *events: Any) -> Job:
    return Job(uid, work(*events))


@pytest.fixture
def inbox() -> Inbox:
    inbox = Inbox(Scheduler(), max_queue=2)
    inbox.open()
    return inbox


def test_jobs_come_out_in_order_and_the_scheduler_knows_them() -> None:
    scheduler = Scheduler()
    inbox = Inbox(scheduler, max_queue=9)
    inbox.open()
    jobs = [job(inbox.next_uid()) for _ in range(3)]
    for one in jobs:
        inbox.post(one)
    assert inbox.waiting == 3
    assert scheduler.waiting == 0
    assert [inbox.take() for _ in jobs] == jobs
    assert inbox.waiting == scheduler.waiting == 3
    assert not inbox
    assert inbox.take() is inbox.take() is None


def test_what_waits_here_and_there_is_bounded_together(inbox: Inbox) -> None:
    inbox.post(job(1))
    inbox.take()
    inbox.post(job(2))
    with pytest.raises(EngineClosedError, match="2 requests are waiting"):
        inbox.post(job(3))


def test_a_closed_inbox_takes_nothing_and_wakes_the_thread() -> None:
    wakened: list[bool] = []
    inbox = Inbox(Scheduler(), max_queue=2, wake=lambda: wakened.append(True))
    inbox.open()
    assert inbox.close()
    assert wakened == [True]
    assert inbox.take() is None
    assert not inbox.close()
    with pytest.raises(EngineClosedError):
        inbox.post(job(1))
    with pytest.raises(EngineClosedError):
        inbox.call(lambda: 1)


def test_calls_are_answered_by_the_thread_that_takes_them(inbox: Inbox) -> None:
    def serve() -> None:
        for _ in range(2):
            while (call := inbox.take()) is None:
                time.sleep(1e-3)
            assert isinstance(call, Call)
            call.run()

    server = threading.Thread(target=serve)
    server.start()
    assert inbox.call(threading.get_ident) == server.ident
    with pytest.raises(ZeroDivisionError):
        inbox.call(lambda: 1 // 0)
    server.join(10)


def test_results_are_values_or_raised() -> None:
    results: Results[int] = Results()
    results.put(3)
    results.put(KeyError("x"))
    assert results.wait() == 3
    with pytest.raises(KeyError):
        results.wait()


def test_a_job_gives_its_events_and_then_its_result() -> None:
    one = job(1, Progress("draft", 1, 2))
    assert next(one.steps) == Progress("draft", 1, 2)
    with pytest.raises(StopIteration, match="done"):
        next(one.steps)


def test_a_stopped_job_may_clean_up_and_is_over() -> None:
    seen: list[str] = []

    def steps() -> Generator[Any, None, None]:
        try:
            yield 1
        except RequestCancelled:
            seen.append("cleaned up")
            raise

    one = Job(1, steps())
    next(one.steps)
    one.stop()
    assert seen == ["cleaned up"]
    assert next(one.steps, None) is None


def test_a_callback_that_raises_cancels_its_job_and_hears_no_more() -> None:
    heard: list[Any] = []

    def listen(event: Any) -> None:
        heard.append(event)
        raise ValueError("not now")

    one = Job(1, work(), on_event=listen)
    one.emit(Progress("draft", 1, 2))
    one.emit(Progress("draft", 2, 2))
    assert len(heard) == 1
    assert one.handle.cancelled


def test_errors_travel_without_the_frames_that_they_and_their_causes_went_through() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        stripped = strip_traceback(error)
    assert stripped.__traceback__ is None
    assert stripped.__cause__.__traceback__ is None
