"""Real agents are launched, or start with what `connect` prints in their files, and complete a task with no network.

The server asks for a key, and its streams are full of keep-alives and progress: no agent may stumble over them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.scripted import (
    CHANGED,
    COMMAND,
    DONE,
    EDITS,
    NOTE,
    SEARCHES,
    TEXT,
    Flavour,
    save_scripted,
    scripts_in,
)
from tests.support.serving import Server, start
from tests.support.waiting import eventually

from .packages import PACKAGES

KEY = "geheim"
NOTES = Path(__file__).with_name("notes.py")
CHATTY = """
from mlx_specprefill_server import report
from mlx_specprefill_server.cli import main
from mlx_specprefill_server.generation import generation

generation.KEEP_ALIVE_S, report.PROGRESS_S = 0.005, 0.001
main()
"""
ALL = pytest.mark.parametrize("agent", PACKAGES)
pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]  # the download, and a busy machine


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which agents work, one behind the other."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory, work: Path) -> Iterator[Callable[[Flavour], Server]]:
    """The scripted model behind a key, by the format in which it calls tools."""
    with ExitStack() as servers:

        @cache
        def serve(flavour: Flavour) -> Server:
            folder = tmp_path_factory.mktemp(f"chatty-{flavour}")
            model = save_scripted(folder / "model", flavour, scripts_in(work))
            options = ("--model-alias", "scripted", "--api-key", KEY)
            return servers.enter_context(start(folder / "log", model, None, *options, program=("-c", CHATTY)))

        yield serve


def counted(server: Server, name: str) -> float:
    text = httpx.get(f"{server.base}/metrics", headers={"x-api-key": KEY}).text
    return sum(map(float, re.findall(rf"^{name}_total(?:\{{.*\}})? (.*)$", text, re.M)))


def answers(server: Server) -> float:
    return counted(server, "vllm:request_success")


def deferred(server: Server) -> float:
    return counted(server, "specprefill_deferred_tools")


@pytest.mark.parametrize("flavour", ["hermes", pytest.param("xml", marks=pytest.mark.nightly)])
@ALL
def test_a_task(chatty: Callable[[Flavour], Server], tmp_path: Path, work: Path, agent: str, flavour: Flavour) -> None:
    package = PACKAGES[agent]
    package.installed()
    home, result = tmp_path / "home", work / "result.txt"
    result.unlink(missing_ok=True)
    server = chatty(flavour)
    home.mkdir()
    before = answers(server)
    said = package.run(home, work, f"Please do script:{package.script} now.", "--url", server.base, "--api-key", KEY)
    if package.script == "text":
        assert TEXT in said
    else:
        assert DONE in said
        written = CHANGED if agent in EDITS else "made by a script"
        assert result.read_text().strip() == written, COMMAND
    assert eventually(lambda: answers(server) - before >= package.requests)
    assert answers(server) - before == package.requests  # nothing was sent twice


def with_notes(home: Path, agent: str) -> None:
    """Write an agent's configuration with an MCP server, as its user has it."""
    server = {"command": sys.executable, "args": [str(NOTES)]}
    if agent == "codex":
        table = f"\n[mcp_servers.notes]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps([str(NOTES)])}\n"
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(table)
        return
    (home / ".claude.json").write_text(json.dumps({"mcpServers": {"notes": server}}))
    (home / ".claude").mkdir()
    (home / ".claude" / "settings.json").write_text(json.dumps({"permissions": {"allow": ["mcp__notes"]}}))


@pytest.mark.parametrize("agent", SEARCHES)
def test_a_tool_of_an_mcp_server_is_searched_for_and_called(
    chatty: Callable[[Flavour], Server], tmp_path: Path, work: Path, agent: str
) -> None:
    package, called = PACKAGES[agent], work / "called.json"
    package.installed()
    called.unlink(missing_ok=True)
    server = chatty("hermes")
    with_notes(tmp_path, agent)
    before = deferred(server)
    options = ("--url", server.base, "--api-key", KEY)
    said = package.run(tmp_path, work, f"Please do script:search-{agent} now.", *options)
    assert NOTE in said
    params = json.loads(called.read_text())
    assert (params["name"], params["arguments"]) == ("read_note", {"number": 7})
    assert (deferred(server) > before) == (agent == "claude")  # Codex does not even send what it has not found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_streams_of_these_tests_are_full_of_progress(chatty: Callable[[Flavour], Server], path: str) -> None:
    words = path + " ".join(map(str, range(3000)))  # which no other request has left in the cache
    body: dict[str, Any] = {
        "input": words,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 5,
        "stream": True,
    }
    if path == "/v1/responses":
        del body["messages"]
    answer = httpx.post(chatty("hermes").base + path, json=body, headers={"x-api-key": KEY}, timeout=120)
    assert len(re.findall(r'": progress |"prompt_progress"|^: progress', answer.text, re.M)) >= 10
