"""The real server as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Server", "heeds_ctrl_c", "start", "start_named"]

START_S = 240
PROGRAM = ("-m", "mlx_specprefill_server")


def heeds_ctrl_c() -> None:
    """In a new process: also where this suite runs in the background of a shell, which ignores SIGINT, and so would
    what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass
class Server:
    base: str
    process: subprocess.Popen[bytes]

    def health(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.base}/health", timeout=30)
        assert answer.status_code == 200
        body: dict[str, Any] = answer.json()
        return body

    def wait_until(self, running: int, within: float = 60.0) -> float:
        """Seconds until so many requests run and none waits."""
        begun = time.monotonic()
        while (state := self.health())["running"] != running or state["queued"]:
            assert time.monotonic() - begun < within, f"still {state}"
            time.sleep(0.05)
        return time.monotonic() - begun


def start(
    log: Path,
    target: Path,
    draft: Path | None,
    *options: str,
    settings: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> AbstractContextManager[Server]:
    """`mlx-specprefill serve` on a free port until the block ends; what it prints goes to `log`.

    Args:
        settings: those that are no options, by the names of their variables.
        program: what Python runs.
    """
    models = ("--target", str(target), *(("--draft", str(draft)) if draft else ()))
    return _serve(log, *models, *options, settings=settings, program=program)


def start_named(log: Path, pair: str, *options: str) -> AbstractContextManager[Server]:
    """The same with a pair of models/pairs.toml."""
    return _serve(log, "--pair", pair, *options)


@contextmanager
def _serve(
    log: Path, *options: str, settings: Mapping[str, str] | None = None, program: Sequence[str] = PROGRAM
) -> Iterator[Server]:
    command = [sys.executable, *program, "serve", "--port", "0", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_SPECPREFILL_")}
    costs = log.with_name("costs.json")  # beside it a server keeps other things, so each has a folder of its own
    environment["MLX_SPECPREFILL_CALIBRATION_FILE"] = str(costs)  # not the user's
    environment |= settings or {}
    with running(command, log, environment) as process:
        yield Server(_base(process, log), process)


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, which Ctrl-C ends, and which is killed if that takes more than a minute."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            finally:
                process.kill()


def _base(process: subprocess.Popen[bytes], log: Path) -> str:
    """Its address, which it logs as soon as it takes requests."""
    until = time.monotonic() + START_S
    while (found := re.search(r"running on (\S+) ", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)
    return found[1]
