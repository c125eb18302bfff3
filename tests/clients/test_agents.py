"""Real agents start with the files that `connect --write` puts there and complete a task, with no network.

The server asks for a key, and its streams are full of keep-alives and progress: no agent may stumble over them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.scripted import COMMAND, DONE, TEXT, Flavour, save_scripted
from tests.support.serving import Server, start
from tests.support.waiting import eventually

from ..connecting.test_connect import BEFORE, FILES, JSON
from .packages import PACKAGES, connect

KEY = "geheim"
CHATTY = """
from mlx_specprefill_server import report
from mlx_specprefill_server.cli import main
from mlx_specprefill_server.generation import generation

generation.KEEP_ALIVE_S, report.PROGRESS_S = 0.005, 0.001
main()
"""
EMPTY = {"claude": "{}\n", "cline": "{}\n"}
ALL = pytest.mark.parametrize("agent", PACKAGES)
pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]  # the download, and a busy machine


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Flavour], Server]]:
    """The scripted model behind a key, by the format in which it calls tools."""
    with ExitStack() as servers:

        @cache
        def serve(flavour: Flavour) -> Server:
            folder = tmp_path_factory.mktemp(f"chatty-{flavour}")
            model = save_scripted(folder / "model", flavour)
            options = ("--model-alias", "scripted", "--api-key", KEY, "--prefill-step", "64")
            return servers.enter_context(start(folder / "log", model, None, *options, program=("-c", CHATTY)))

        yield serve


def answers(server: Server) -> float:
    text = httpx.get(f"{server.base}/metrics", headers={"x-api-key": KEY}).text
    return sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (.*)$", text, re.M)))


def existing(home: Path, agent: str) -> None:
    """Make a configuration as somebody may have made it before, with comments where they can be kept."""
    path = home / FILES[agent]
    path.parent.mkdir(parents=True)
    path.write_text((EMPTY | BEFORE).get(agent, JSON))


@pytest.mark.parametrize("flavour", ["hermes", pytest.param("xml", marks=pytest.mark.nightly)])
@ALL
def test_a_task(chatty: Callable[[Flavour], Server], tmp_path: Path, agent: str, flavour: Flavour) -> None:
    package = PACKAGES[agent]
    package.installed()
    home, work = tmp_path / "home", tmp_path / "work"
    work.mkdir()
    existing(home, agent)
    server = chatty(flavour)
    connect(home, agent, "--url", server.base, "--api-key", KEY, "--write")
    before = answers(server)
    said = package.run(home, work, f"Please do script:{package.script} now.")
    if package.script == "text":
        assert TEXT in said
    else:
        assert DONE in said
        assert (work / "result.txt").read_text() == "made by a script", COMMAND
    assert eventually(lambda: answers(server) - before >= package.requests)
    assert answers(server) - before == package.requests  # nothing was sent twice


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
