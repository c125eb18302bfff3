"""An agent's system prompt outlives the server, for this user only, unless it is told not to keep it."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Server, start
from tests.support.waiting import eventually

from .conftest import PAIR, filler

pytestmark = pytest.mark.extended

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "agents.md"
ADDRESS = "http://127.0.0.1:8000"
SYSTEM = " ".join(filler(700, seed=5))


def ask(server: Server, text: str, **more: Any) -> dict[str, Any]:
    """The report of one session's first turn."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 2, **more}
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()["specprefill"]
    return report


def warm(server: Server, folder: Path) -> dict[str, Any]:
    """The answer to the commands of the agents' guide that warm, with a record of one request."""
    record = folder / "runs" / "agents" / "opencode.jsonl"
    record.parent.mkdir(parents=True)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}]
    record.write_text(json.dumps({"body": {"messages": messages, "max_tokens": 32000, "stream": True}}) + "\n")
    _, commands = re.findall(r"```sh\n(.*?)```", GUIDE.read_text().partition("## Before the first session")[2], re.S)[
        0
    ].split("\n", 1)
    done = subprocess.run(
        ["sh", "-euc", commands.replace(ADDRESS, server.base)], cwd=folder, capture_output=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_warmed_system_prompt_serves_the_first_session_and_those_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    with start(tmp_path / "log", *PAIR) as server:
        warmed = warm(server, tmp_path)
        assert (warmed["choices"][0]["finish_reason"], warmed["usage"]["completion_tokens"]) == ("length", 0)
        opening = ask(server, "What did the baker do?")["cached_tokens"]
        assert opening > warmed["usage"]["prompt_tokens"] - 8 > 700
        ask(server, "Where was the river?", cache_salt="mine")
        ask(server, "Who was it?", cache_salt="mine")
        blocks = opening // 256
        stored = 2 * blocks  # of target and draft; the draft reads when the server is idle
        assert eventually(lambda: len(list(folder.rglob("*.safetensors"))) == stored)
    assert len(list(folder.rglob("*.safetensors"))) == stored
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.*")} == {0o600}
    with start(tmp_path / "log2", *PAIR) as server:
        assert ask(server, "And the gardener?")["cached_tokens"] == 256 * blocks
        assert ask(server, "And mine?", cache_salt="mine")["cached_tokens"] == 0


@pytest.mark.nightly
def test_one_flag_turns_it_off(tmp_path: Path) -> None:
    with start(tmp_path / "log", *PAIR, "--no-remember") as server:
        for text in ("One?", "Two?", "Three?"):
            ask(server, text)
    assert not (tmp_path / "prompts").exists()
