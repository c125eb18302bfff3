"""The disk has no room for the cache: the server says so, and answers."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import httpx
import pytest

from .conftest import haystack
from .test_start import KNOWN, launch, wait_for

BODY = {"messages": [{"role": "user", "content": haystack("Anna", "471128", 700, 0.2, seed=3)}], "max_tokens": 16}


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, 40 << 10))  # bytes of each file, fewer than any prefix has


@pytest.mark.extended
def test_a_cache_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "prefixes"
    process = launch(log, "--port", "0", *KNOWN, "--prefix-cache-dir", str(folder), limits=no_room)
    try:
        wait_for(log, process, "running on ")
        base = log.read_text().partition("running on ")[2].split()[0]
        for _ in range(2):
            answer = httpx.post(f"{base}/v1/chat/completions", json=BODY, timeout=120)
            assert "471128" in answer.json()["choices"][0]["message"]["content"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert "Traceback" not in log.read_text()
    assert not list(folder.rglob("*.safetensors"))
