"""Processes on this machine that MLX's ring connects, as `mlx.launch` would start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has at the moment."""
    for first in range(33000 + os.getpid() % 1000 * 8, 60000, count):
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no free ports")


def environments(folder: Path, size: int = 2) -> list[dict[str, str]]:
    """Return the environments of the ranks, as `mlx.launch` sets them."""
    first = free_ports(size)
    file = folder / "ring.json"
    file.write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(size)]))
    path = os.pathsep.join([str(ROOT), str(ROOT / "server"), os.environ.get("PYTHONPATH", "")])
    common = dict(os.environ) | {"PYTHONPATH": path, "MLX_HOSTFILE": str(file), "OPENBLAS_NUM_THREADS": "1"}
    return [common | {"MLX_RANK": str(rank)} for rank in range(size)]


@contextmanager
def started(
    folder: Path, *command: str, size: int = 2, settings: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process per rank, with its output in `rank-N.log`; whatever is left of them is killed at the end."""
    processes = []
    try:
        for rank, environment in enumerate(environments(folder, size)):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=ROOT,
                        env=environment | (settings or {}),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def logs(folder: Path) -> str:
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("rank-*.log")))


def found_in(case: str, folder: Path, limit: float) -> dict[str, Any]:
    """Return what rank 0 of two wrote of a case of the worker, within so many seconds."""
    out = folder / "out.json"
    with started(folder, "-m", "tests.distributed.worker", case, str(out)) as processes:
        until = time.monotonic() + limit
        for process in processes:
            process.wait(max(1.0, until - time.monotonic()))
    assert out.is_file(), logs(folder)
    results: dict[str, Any] = json.loads(out.read_text())
    return results
