"""A prompt that does not fit: each agent takes the error for what it is, and does not send the prompt for ever.

opencode is not among them: where its own first prompt does not fit, it compacts and tries again without end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.scripted import save_scripted
from tests.support.serving import Server, start

from .packages import PACKAGES

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

WINDOW = 2048
REQUESTS = {"codex": 1, "claude": 0, "qwen": 3, "cline": 1, "continue": 2}  # Claude Code believes the window it is told
SAYS = {
    "codex": "ran out of room in the model's context window",
    "claude": "Prompt is too long",
    "qwen": f"maximum context length is {WINDOW} tokens",
    "cline": "exceeds the model's context window",
    "continue": "Context length exceeded",
}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """The scripted model with a window that no agent's first prompt fits into, and the server's log."""
    folder = tmp_path_factory.mktemp("narrow")
    model = save_scripted(folder / "model")
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(settings | {field: WINDOW}))
    with start(folder / "log", model, None, "--model-alias", "scripted") as server:
        yield server, folder / "log"


@pytest.mark.parametrize("agent", REQUESTS)
def test_an_agent_stops(narrow: tuple[Server, Path], tmp_path: Path, agent: str) -> None:
    package = PACKAGES[agent]
    package.installed()
    server, log = narrow
    before = log.read_text().count(": POST /v1/")
    done = package.ended(tmp_path, tmp_path, f"Please do script:{package.script} now.", "--url", server.base)
    assert done.returncode != 0
    assert SAYS[agent] in done.stdout + done.stderr
    assert log.read_text().count(": POST /v1/") - before <= REQUESTS[agent]
