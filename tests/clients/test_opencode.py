"""A real agent, opencode from npm, completes a tool loop with the scripted model and no network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from ..scripted import COMMAND, DONE, Flavour
from ..serving import Server
from ..waiting import eventually

VERSION = "1.18.33"
HOME = Path(__file__).parents[2] / ".agents"  # kept between runs: it is 350 MB
NOWHERE = "http://127.0.0.1:9"  # as a proxy: whatever is not the server can't be reached


@pytest.fixture(scope="session")
def opencode() -> Path:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = HOME / f"opencode-{VERSION}"
    program = folder / "node_modules" / ".bin" / "opencode"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        quiet = ("--no-fund", "--no-audit", "--loglevel=error")
        subprocess.run(["npm", "install", *quiet, f"opencode-ai@{VERSION}"], cwd=folder, check=True)
    return program


def configure(folder: Path, server: Server) -> None:
    """As docs/clients/README.md has it."""
    options = {"baseURL": f"{server.base}/v1"}
    models = {"scripted": {"name": "scripted", "limit": {"context": 131072, "output": 4096}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "local", "options": options, "models": models}
    config = {"provider": {"local": provider}, "model": "local/scripted", "small_model": "local/scripted"}
    (folder / "opencode.json").write_text(json.dumps({**config, "autoupdate": False, "share": "disabled"}))


def run(program: Path, folder: Path, prompt: str) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    (folder / "home").mkdir()
    command = [str(program), "run", prompt]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def answers(server: Server) -> float:
    found = re.findall(r"^vllm:request_success_total\{.*\} (.*)$", httpx.get(f"{server.base}/metrics").text, re.M)
    return sum(map(float, found))


@pytest.mark.timeout(900)  # the download, and a busy machine
@pytest.mark.parametrize("flavour", ["hermes", "xml"])
def test_a_tool_loop(opencode: Path, scripted: Callable[[Flavour], Server], tmp_path: Path, flavour: Flavour) -> None:
    server = scripted(flavour)
    configure(tmp_path, server)
    before = answers(server)
    said = run(opencode, tmp_path, "Please do script:opencode now.")
    assert COMMAND in said
    assert DONE in said
    assert (tmp_path / "result.txt").read_text() == "made by a script"
    assert eventually(lambda: answers(server) - before >= 3)
    assert answers(server) - before == 3  # a title, the call, the end: nothing was sent twice
