"""The real server process on the bundled pair."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

DEMO = Path(__file__).parents[2] / "models" / "demo"
START_S = 90


@dataclass
class Server:
    base: str
    process: subprocess.Popen[bytes]

    def health(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.base}/health", timeout=30)
        assert answer.status_code == 200
        body: dict[str, Any] = answer.json()
        return body

    def wait_until(self, running: int, within: float = 20.0) -> float:
        """Seconds until so many requests run and none waits."""
        begun = time.monotonic()
        while (state := self.health())["running"] != running or state["queued"]:
            assert time.monotonic() - begun < within, f"still {state}"
            time.sleep(0.05)
        return time.monotonic() - begun


@contextmanager
def start(log: Path, *options: str) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = ("--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"))
    command = [sys.executable, "-m", "mlx_specprefill_server", "serve", *pair, "--port", str(port), *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLX_SPECPREFILL_")}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            _wait(server, log)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            finally:
                process.kill()


def _wait(server: Server, log: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        assert server.process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        try:
            server.health()
        except httpx.TransportError:
            time.sleep(0.2)
        else:
            return


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    # a small step, so that "within one step" is a short time on a slow machine too
    with start(log, "--specprefill-threshold", "512", "--prefill-step", "256") as running:
        yield running
    assert "Traceback" not in log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=120) as sdk:
        yield sdk


SUBJECTS = "The gardener|A traveller|The old clock|My neighbour|The river|A small boat|The baker|The library".split("|")
VERBS = "watched|passed|remembered|painted|followed|waited for|described|forgot".split("|")
OBJECTS = "the morning train|a row of lamps|the empty market|the long road|a warm lantern|the stone bridge".split("|")
PLACES = "near the harbour|behind the school|in the valley|on the hill|by the window|after the rain".split("|")


def filler(words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        parts = (rng.choice(choices) for choices in (SUBJECTS, VERBS, OBJECTS, PLACES))
        sentences.append(" ".join(parts) + ".")
    return sentences


def haystack(name: str, code: str, words: int, depth: float, seed: int) -> str:
    """A question whose answer is one sentence somewhere in prose that has nothing to do with it."""
    sentences = filler(words, seed)
    sentences.insert(int(len(sentences) * depth), f"The secret code for {name} is {code}.")
    return " ".join(sentences) + f"\n\nWhat is the secret code for {name}?"
