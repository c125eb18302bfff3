"""Real agents on a real model of 135 million parameters, too small for their tools: a turn begins and ends.

Without a GPU their prompts take longer than they are told to wait here: keep-alives and progress have to count as life.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from tests.support.serving import start_named

from .packages import PACKAGES

REQUESTS = {"codex": 1, "opencode": 2}  # one of them for a title
WAITS_MS = 20_000  # for the next event
IMPATIENT = f"""
from mlx_specprefill_server import agent_setup
from mlx_specprefill_server.cli import agents, main

agent_setup._PATIENCE_MS = {WAITS_MS}
agents._check_tools = lambda agent, server: None
main()
"""
PATIENCE_S = 2400  # thousands of tokens on a busy machine without a GPU

pytestmark = [pytest.mark.extended, pytest.mark.timeout(PATIENCE_S + 300)]


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("agent", ["codex", "opencode"])
def test_a_turn_ends(tmp_path: Path, agent: str) -> None:
    package = PACKAGES[agent]
    package.installed()
    with start_named(tmp_path / "log", "smollm2", "--specprefill-threshold", "1024") as server:
        question = "What is the capital of France? Answer in one word."
        done = package.ended(
            tmp_path, tmp_path, question, "--url", server.base, patience=PATIENCE_S, launcher=("-c", IMPATIENT)
        )
        said = done.stdout + done.stderr
        ends = httpx.get(f"{server.base}/metrics").text
    found = re.findall(r"^vllm:request_success_total\{.*\} (.*)$", ends, re.M)
    assert done.returncode == 0, said
    assert "Paris" in said
    assert 1 <= sum(map(float, found)) <= REQUESTS[agent]  # none was given up and sent again
