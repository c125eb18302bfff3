"""Two processes on this machine, started by `mlx.launch`, serve one model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import start_named
from tests.support.waiting import eventually

from .ranks import ROOT, free_ports

pytestmark = pytest.mark.nightly

PROMPTS = ("The capital of France is", " ".join(f"Box {i} holds {i * 7 % 101} marbles." for i in range(120)))


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """The launcher, the server's address, and what all of them print."""
    log, ports = folder / "log", free_ports(3)
    command = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "2", "--backend", "ring", "-p", str(ports + 1)]
    command += ["--", sys.executable, "-m", "mlx_specprefill_server", "serve", "--pair", "demo", "--port", str(ports)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    environment |= {
        "MLX_SPECPREFILL_CALIBRATION_FILE": str(folder / "costs.json"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
        "MLX_SPECPREFILL_SHUTDOWN_GRACE_S": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert eventually(lambda: "running on" in log.read_text() or process.poll() is not None, 240)
            assert process.poll() is None, log.read_text()
            yield process, f"http://127.0.0.1:{ports}", log
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def process_of(rank: int, log: Path) -> int:
    found = re.search(rf"process (\d+) is rank {rank} of 2", log.read_text())
    assert found is not None, log.read_text()
    return int(found[1])


def completed(base: str, prompt: str) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "specprefill": len(prompt) > 1000}
    answer = httpx.post(f"{base}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    ("given", "scorer", "ends"),
    [((), "draft", "rank 0 is asked to"), (("--draft", "self"), "own first layers", "Ctrl-C")],
)
def test_it_answers_as_one_process_does_and_ends_when_asked(
    tmp_path: Path, given: tuple[str, ...], scorer: str, ends: str
) -> None:
    with start_named(tmp_path / "one", "demo", *given) as alone:
        expected = [completed(alone.base, prompt) for prompt in PROMPTS]
        (one,) = httpx.get(f"{alone.base}/v1/models").json()["data"]
    with served(tmp_path, *given) as (process, base, log):
        found = [completed(base, prompt) for prompt in PROMPTS]
        (model,) = httpx.get(f"{base}/v1/models").json()["data"]
        if ends == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process_of(0, log), signal.SIGTERM)
        process.wait(60)
    assert [one["choices"][0]["text"] for one in found] == [one["choices"][0]["text"] for one in expected]
    assert [one["usage"] for one in found] == [one["usage"] for one in expected]
    assert model["ranks"] == {"count": 2, "sharding": "tensor"}
    assert model["scorer"] == one["scorer"] == scorer
    assert "of 2 ends:" not in log.read_text()


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_ends_the_server(tmp_path: Path, dies: int) -> None:
    with served(tmp_path) as (process, base, log):
        body = {"prompt": PROMPTS[1], "max_tokens": 4000, "ignore_eos": True, "stream": True, "specprefill": False}
        begun = threading.Event()

        def read() -> None:
            with suppress(httpx.HTTPError), httpx.stream("POST", f"{base}/v1/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(120)
        os.kill(process_of(dies, log), signal.SIGKILL)
        process.wait(120)
        reader.join(60)
    with pytest.raises(ProcessLookupError):
        os.kill(process_of(1 - dies, log), 0)
