"""A process that dies, differs or is missing ends, and the log says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specprefill_server.cli.serve.ranks import follow
from mlx_specprefill_server.running.process import GRACE_S
from tests.support.waiting import eventually

from .ranks import logs, started

pytestmark = pytest.mark.extended

WORKER = ("-m", "tests.distributed.worker")


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_ends_the_other(tmp_path: Path, dies: int) -> None:
    with started(tmp_path, *WORKER, "idle", str(tmp_path / "out.json")) as processes:
        assert eventually(lambda: "waiting" in (tmp_path / "rank-0.log").read_text(), 120), logs(tmp_path)
        processes[dies].kill()
        assert processes[1 - dies].wait(60) == 1, logs(tmp_path)
    assert "another rank is gone" in (tmp_path / f"rank-{1 - dies}.log").read_text()


def test_a_rank_that_fails_alone_ends(tmp_path: Path) -> None:
    """The other one may wait for it in the ring: what has started them ends it."""
    with started(tmp_path, *WORKER, "astray", str(tmp_path / "out.json")) as processes:
        assert processes[1].wait(60) == 1, logs(tmp_path)
    told = (tmp_path / "rank-1.log").read_text()
    assert "another rank does something else than 'failure: ValueError': this rank is broken" in told


def test_a_rank_that_is_asked_to_end_is_ended_by_the_system_if_it_hangs() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hangs: Any = SimpleNamespace(follow=lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        follow(hangs)
        assert GRACE_S < signal.alarm(0) <= GRACE_S + 10
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def joined(folder: Path, script: str) -> list[int]:
    """Return the exit statuses of two processes that run the script."""
    file = folder / "join.py"
    file.write_text(
        f"import os, sys\nfrom mlx_specprefill import join_ranks\nrank = os.environ['MLX_RANK']\n{script}\n"
    )
    with started(folder, str(file)) as processes:
        return [process.wait(60) for process in processes]


def test_a_rank_that_differs_is_named(tmp_path: Path) -> None:
    assert joined(tmp_path, "join_ranks(20, {'settings': rank})") == [1, 1]
    for rank in range(2):
        told = (tmp_path / f"rank-{rank}.log").read_text()
        assert f"rank 1 has another settings than rank 0; rank {rank} has '{rank}'" in told


def test_a_rank_that_is_missing_is_told(tmp_path: Path) -> None:
    assert joined(tmp_path, "sys.exit() if rank == '1' else join_ranks(3)")[0] == 1
    told = (tmp_path / "rank-0.log").read_text()
    assert "the ranks of this model don't find each other (not all have come in 3 s)" in told
