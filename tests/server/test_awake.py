"""`caffeinate` runs while requests are in work, on macOS only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_specprefill_server.running import awake
from mlx_specprefill_server.running.awake import Awake
from tests.support.waiting import eventually

PROGRAM = """#!/bin/sh
echo "$@" >> "{log}"
exec sleep 60
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the program notes how it is called."""
    program, log = tmp_path / "caffeinate", tmp_path / "log"
    program.write_text(PROGRAM.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(awake, "_LINGER_S", 0.0)
    return log


def test_one_program_runs_from_the_first_request_to_the_last(log: Path) -> None:
    keeper = Awake()
    keeper.note(False)
    assert keeper._process is None
    for _ in range(3):
        keeper.note(True)
    process = keeper._process
    assert process is not None
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n"))  # it is made before it is written
    assert [line.split()[:2] for line in log.read_text().splitlines()] == [["-i", "-w"]]
    keeper.note(False)
    assert process.poll() is not None
    keeper.note(True)
    keeper.end()
    assert keeper._process is None


def test_other_systems_have_no_such_program(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    keeper = Awake()
    keeper.note(True)
    assert keeper._process is None
    assert not log.exists()
