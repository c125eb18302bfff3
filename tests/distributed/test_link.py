"""Rank 0's errors about a rank that no longer answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client

import pytest

from mlx_specprefill.distributed.link import Link, RankInfo
from tests.support.waiting import eventually

TIMEOUT_S = 2.0


def two_here() -> RankInfo:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return RankInfo(0, 2, probe.getsockname(), ("here", "there"), b"key")


@pytest.mark.parametrize(
    ("alive", "lost", "words"),
    [
        (False, 1, "rank 1 (there) is lost: it has been silent for"),
        (True, 0, "the 2 ranks have waited for each other for"),
    ],
)
def test_a_rank_that_hangs_is_named_though_the_step_has_taken_too_long_first(
    alive: bool, lost: int, words: str
) -> None:
    info, stop = two_here(), threading.Event()

    def other() -> None:
        connection = Client(info.control, authkey=info.key)
        connection.send_bytes(json.dumps({"rank": 1}).encode())
        while not stop.wait(0.1):
            if alive:
                connection.send_bytes(json.dumps({"beat": True}).encode())

    def call() -> None:
        while not stop.is_set():
            try:
                return other()
            except ConnectionRefusedError:  # rank 0 does not listen yet
                time.sleep(0.01)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        link = Link(info, TIMEOUT_S)
        try:
            time.sleep(0.6 * TIMEOUT_S)  # silent for more than two signs of life, and not yet for the whole time
            step = time.monotonic() - 1.2 * TIMEOUT_S
            link.watch(lambda: step)
            assert eventually(lambda: link.lost is not None, TIMEOUT_S)
        finally:
            link.close()
            stop.set()
        done.result()
    assert link.lost is not None
    assert (link.lost.rank, str(link.lost)[: len(words)]) == (lost, words)
