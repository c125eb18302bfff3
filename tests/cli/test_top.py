"""The terminal's panel over a real server with a fake engine."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


def top(*options: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["top", "--once", *options])
    return result.exit_code, result.output


def test_one_look_shows_requests_memory_and_recent_answers(live: Any) -> None:
    base, _ = live()
    body = {"messages": [{"role": "user", "content": "a secret"}], "specprefill": True}
    assert httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60).status_code == 200
    status, text = top("--url", f"{base}/v1")
    assert status == 0
    for shown in ("demo/target", "draft demo/draft", "prefix hits 3/7", "sparse sessions", "asked for", "stop"):
        assert shown in text
    assert "secret" not in text


def test_a_key_is_sent_and_its_absence_is_said_in_one_line(live: Any) -> None:
    base, _ = live(api_keys=("geheim",))
    assert top("--url", base, "--api-key", "geheim")[0] == 0
    status, text = top("--url", base)
    assert status == 2
    assert "--api-key" in text


@pytest.mark.parametrize("path", ["/nowhere", ""])
def test_a_server_of_another_kind_or_none_is_an_error_in_one_line(live: Any, path: str) -> None:
    base, _ = live()
    url = f"{base}{path}" if path else "http://127.0.0.1:9"
    status, text = top("--url", url)
    assert status == 2
    assert text.startswith("error: ")
    assert len(text.splitlines()) == 1


def test_the_key_comes_from_the_servers_own_variable(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, _ = live(api_keys=("geheim", "other"))
    monkeypatch.setenv("MLX_SPECPREFILL_API_KEYS", "geheim, other")
    assert top("--url", base)[0] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX terminal")
def test_q_ends_it_and_the_terminal_is_as_before(live: Any) -> None:
    base, _ = live()
    outside, inside = os.openpty()
    before = termios.tcgetattr(inside)
    command = [sys.executable, "-m", "mlx_specprefill_server", "top", "--url", base, "--interval", "60"]
    with subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside) as process:
        try:
            while b"prefix hits" not in os.read(outside, 1 << 16):
                assert process.poll() is None
            os.write(outside, b"q")
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert termios.tcgetattr(inside) == before
