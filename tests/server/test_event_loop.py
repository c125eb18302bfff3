from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from mlx_specprefill_server.generation.event_loop import ThreadsafeCalls


class CountedLoop:
    """Stands in for an event loop: holds what it was woken for."""

    def __init__(self, closed: bool = False) -> None:
        self.woken: list[Callable[[], Any]] = []
        self.closed = closed

    def call_soon_threadsafe(self, call: Callable[[], Any]) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.woken.append(call)


def calls_to(loop: Any) -> ThreadsafeCalls:
    return ThreadsafeCalls(loop)


def test_what_comes_together_wakes_the_loop_once_and_keeps_its_order() -> None:
    loop, seen = CountedLoop(), list[int]()
    post = calls_to(loop).post
    for item in range(8):
        post(seen.append, item)
    assert len(loop.woken) == 1
    loop.woken.pop()()
    assert seen == list(range(8))
    post(seen.append, 8)
    assert len(loop.woken) == 1


def test_one_that_raises_takes_no_other_along() -> None:
    failures: list[dict[str, Any]] = []

    async def main() -> list[int]:
        loop, seen = asyncio.get_running_loop(), list[int]()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        post = ThreadsafeCalls(loop).post
        post(seen.append, 1)
        post(int, "no number")
        post(seen.append, 2)
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(main()) == [1, 2]
    assert [type(context["exception"]) for context in failures] == [ValueError]


def test_what_is_posted_while_running_is_not_lost() -> None:
    loop, seen = CountedLoop(), list[int]()
    line = calls_to(loop)

    def again(item: int) -> None:
        seen.append(item)
        if item < 3:
            line.post(again, item + 1)

    line.post(again, 0)
    while loop.woken:
        loop.woken.pop()()
    assert seen == [0, 1, 2, 3]


def test_nothing_is_called_on_a_closed_loop() -> None:
    seen: list[str] = []
    calls_to(CountedLoop(closed=True)).post(seen.append, "never")
    assert seen == []


def test_nothing_is_lost_between_threads() -> None:
    count = 2000

    async def main() -> list[tuple[int, int]]:
        line, seen = ThreadsafeCalls(asyncio.get_running_loop()), list[tuple[int, int]]()

        def work(thread: int) -> None:
            for item in range(count):
                line.post(seen.append, (thread, item))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        while len(seen) < 3 * count:
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run(asyncio.wait_for(main(), 60))
    for thread in range(3):
        assert [item for who, item in seen if who == thread] == list(range(count))
