"""`serve --hosts` with two processes on this machine, started by mlx.launch."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import running, start_named
from tests.support.waiting import eventually

from .ranks import ROOT, free_ports

pytestmark = pytest.mark.nightly

PROMPTS = ("The capital of France is", " ".join(f"Box {i} holds {i * 7 % 101} marbles." for i in range(120)))


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The launcher, the server's address, and what all of them print."""
    hosts, log = folder / "hosts.json", folder / "log"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    ports = free_ports(4)
    command = [sys.executable, "-m", "mlx_specprefill_server", "serve", "--pair", "demo", "--port", str(ports)]
    command += ["--hosts", str(hosts), "--starting-port", str(ports + 2), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    environment |= {
        "MLX_SPECPREFILL_CALIBRATION_FILE": str(folder / "costs.json"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
        "OPENBLAS_NUM_THREADS": "1",
    }
    with running(command, log, environment) as process:
        assert eventually(lambda: "running on" in log.read_text() or process.poll() is not None, 240)
        assert process.poll() is None, log.read_text()
        yield process, f"http://127.0.0.1:{ports}", log


def completed(base: str, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "specprefill": len(prompt) > 1000}
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    ("given", "placed", "draft", "scorer"),
    [
        ((), ("--draft-placement", "first"), "first", "draft"),
        ((), ("--draft-placement", "sharded"), "sharded", "draft"),
        (("--draft", "self"), (), "sharded", "own first layers"),
    ],
)
def test_it_answers_as_one_process_does_and_ends_when_asked(
    tmp_path: Path, given: tuple[str, ...], placed: tuple[str, ...], draft: str, scorer: str
) -> None:
    with start_named(tmp_path / "one", "demo", *given) as alone:
        expected = [completed(alone.base, prompt) for prompt in PROMPTS]
        (one,) = httpx.get(f"{alone.base}/v1/models").json()["data"]
    with served(tmp_path, *given, *placed) as (process, base, log):
        found = [completed(base, prompt) for prompt in PROMPTS]
        (model,) = httpx.get(f"{base}/v1/models").json()["data"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    assert [one["choices"][0]["text"] for one in found] == [one["choices"][0]["text"] for one in expected]
    assert [one["usage"] for one in found] == [one["usage"] for one in expected]
    assert model["ranks"] == {"count": 2, "sharding": "tensor", "draft": draft}
    assert model["scorer"] == one["scorer"] == scorer
    assert "Traceback" not in log.read_text()


def test_a_lost_rank_ends_the_server_and_every_answer(tmp_path: Path) -> None:
    with served(tmp_path) as (process, base, log):
        found = re.search(r"process (\d+) is rank 1 of 2", log.read_text())
        assert found is not None, log.read_text()
        body = {"prompt": PROMPTS[1], "max_tokens": 4000, "ignore_eos": True, "stream": True, "specprefill": False}
        lines: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(120)
        os.kill(int(found[1]), signal.SIGKILL)
        with httpx.Client(base_url=base) as client:
            assert eventually(lambda: client.get("/health").status_code == 503, 20)
            health = client.get("/health").json()
        reader.join(60)
        assert process.wait(60) == 1, log.read_text()
    assert "rank 1 (127.0.0.1) is lost" in health["error"]["message"]
    (error,) = [line for line in lines if '"error"' in line] or [f"no error: {lines[-5:]} {log.read_text()}"]
    assert "rank 1 (127.0.0.1) is lost" in error


MISSING = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "nowhere.invalid", "ips": ["127.0.0.1"]}]


@pytest.mark.parametrize(
    ("content", "status", "why"),
    [
        (None, 2, "there is no such file"),
        ("nothing", 2, "this is no hostfile of MLX's"),
        (json.dumps(MISSING), 1, "rank 1 on nowhere.invalid"),
    ],
)
def test_what_can_not_be_launched(tmp_path: Path, content: str | None, status: int, why: str) -> None:
    hosts = tmp_path / "hosts.json"
    if content is not None:
        hosts.write_text(content)
    options = ("--hosts", str(hosts), "--starting-port", str(free_ports(4) + 1), "--port", "0", "--pair", "demo")
    command = [sys.executable, "-m", "mlx_specprefill_server", "serve", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert ended.returncode == status, ended.stderr
    assert why in ended.stderr
