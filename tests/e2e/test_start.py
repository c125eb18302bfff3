"""The real process: what keeps it from starting, what it survives, and how it ends while it starts."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.serving import start

from .conftest import PAIR

OPTIONS = ("--target", str(PAIR[0]), "--draft", str(PAIR[1]))
KNOWN = ("--specprefill-threshold", "512")  # nothing is measured


def launch(log: Path, *options: str, limits: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_SPECPREFILL_")}
    environment["MLX_SPECPREFILL_CALIBRATION_FILE"] = str(log.with_name("costs.json"))
    command = [sys.executable, "-m", "mlx_specprefill_server", "serve", *OPTIONS, *options]
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, preexec_fn=limits)


def refused(log: Path, *options: str, limits: Callable[[], None] | None = None) -> str:
    """Return the message of a server that does not start."""
    process = launch(log, "--port", "0", *KNOWN, *options, limits=limits)
    try:
        assert process.wait(240) == 2, log.read_text()
    finally:
        process.kill()
    said = log.read_text()
    assert "Traceback" not in said
    return said


def wait_for(log: Path, process: subprocess.Popen[bytes], text: str) -> None:
    until = time.monotonic() + 240
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.02)


@pytest.mark.extended
def test_a_memory_limit_below_the_weights(tmp_path: Path) -> None:
    said = refused(tmp_path / "log", "--memory-limit", "1MB")
    assert "--memory-limit of 1.0 MiB is below the weights: target " in said
    assert "are needed" in said


@pytest.mark.extended
def test_a_prefix_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """A file has its name. (To the superuser no folder is closed.)"""
    (tmp_path / "taken").write_text("")
    options = ("--prefix-cache-dir", str(tmp_path / "taken"))
    said = refused(tmp_path / "log", *options)
    assert "the prefix cache folder can't be used: " in said


def few_files(hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.extended
@pytest.mark.nightly
def test_few_open_files_are_enough_or_it_says_so(tmp_path: Path) -> None:
    said = refused(tmp_path / "log", limits=few_files(32))
    assert "the limit on open files is 32, and this server needs at least" in said
    log = tmp_path / "log"
    process = launch(log, "--port", "0", *KNOWN, limits=few_files(64))
    try:
        wait_for(log, process, "running on ")
        assert "the limit on open files is 64" in log.read_text()
        base = log.read_text().partition("running on ")[2].split()[0]
        with ExitStack() as stack:
            host, port = base.removeprefix("http://").split(":")
            for _ in range(100):
                stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            assert httpx.get(f"{base}/health", timeout=60).status_code == 200
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@pytest.mark.extended
@pytest.mark.nightly
def test_two_thousand_silent_sockets_a_closed_terminal_and_an_open_address(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2500:
        pytest.skip("needs 2500 open files")
    log = tmp_path / "log"
    with start(log, *PAIR, *KNOWN, "--host", "0.0.0.0") as server:
        assert "every machine that can reach 0.0.0.0 can use this server: set --api-key" in log.read_text()
        server.process.send_signal(signal.SIGHUP)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500), hard))
        port = int(server.base.rpartition(":")[2])
        try:
            with ExitStack() as stack:
                for _ in range(2000):
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
                assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert server.process.poll() is None
