"""A process that dies, hangs or differs: nothing waits for it, and everybody is told which one it was."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.waiting import eventually

from .ranks import logs, started

pytestmark = pytest.mark.extended

WORKER = ("-m", "tests.distributed.worker")


@pytest.mark.parametrize(
    ("sign", "why"),
    [(signal.SIGKILL, "has ended"), pytest.param(signal.SIGSTOP, "silent for", marks=pytest.mark.nightly)],
)
def test_a_rank_that_dies_or_hangs(tmp_path: Path, sign: signal.Signals, why: str) -> None:
    out = tmp_path / "out.json"
    with started(tmp_path, *WORKER, "die", str(out), settings={"TIMEOUT_S": "6"}) as (first, second):
        assert eventually(lambda: "answering" in (tmp_path / "rank-0.log").read_text(), 120), logs(tmp_path)
        time.sleep(0.5)
        second.send_signal(sign)
        assert first.wait(90) == 3, logs(tmp_path)
    told = json.loads(out.read_text())
    assert told["error"] == "PeerLostError"
    assert told["message"].startswith("rank 1 (127.0.0.1) is lost")
    assert why in told["message"]
    assert told["health"] == told["refused"] == told["message"]


@pytest.mark.nightly
def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    with started(tmp_path, *WORKER, "hang", str(tmp_path / "out.json"), settings={"TIMEOUT_S": "6"}) as processes:
        assert [process.wait(90) for process in processes] == [4, 4], logs(tmp_path)
    assert "lost: the 2 ranks have waited for each other for" in logs(tmp_path)


def test_rank_0_that_dies_ends_the_others(tmp_path: Path) -> None:
    with started(tmp_path, *WORKER, "die", str(tmp_path / "out.json")) as (first, second):
        assert eventually(lambda: "answering" in (tmp_path / "rank-0.log").read_text(), 120), logs(tmp_path)
        first.kill()
        assert second.wait(60) != 0
    assert "rank 0 (127.0.0.1) is lost" in (tmp_path / "rank-1.log").read_text()


def test_a_rank_that_differs_is_named(tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(
        "import os\nfrom mlx_specprefill import join_ranks\njoin_ranks(20, {'settings': os.environ['MLX_RANK']})\n"
    )
    with started(tmp_path, str(script)) as processes:
        assert [process.wait(60) for process in processes] == [1, 1]
    for rank in range(2):
        assert (
            "rank 1 (127.0.0.1) has another settings than rank 0: '1', not '0'"
            in (tmp_path / f"rank-{rank}.log").read_text()
        )


def test_a_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    script = tmp_path / "join.py"
    script.write_text(
        "import os, sys\nfrom mlx_specprefill import join_ranks\n"
        "sys.exit() if os.environ['MLX_RANK'] == '1' else join_ranks(3)\n"
    )
    with started(tmp_path, str(script)) as processes:
        assert processes[0].wait(60) == 1
    assert "rank 1 (127.0.0.1) did not come" in (tmp_path / "rank-0.log").read_text()
