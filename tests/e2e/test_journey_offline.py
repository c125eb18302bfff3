"""Models under their ids, from an empty machine to an answer: pulled from a hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.hub import hub_of
from tests.support.serving import start
from tests.support.tiny import save_checkpoint

pytestmark = pytest.mark.extended

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
QUESTION = {"prompt": "w7 w8 w9 " * 30, "max_tokens": 4, "temperature": 0, "specprefill": True}


def answer(tmp_path: Path, settings: dict[str, str]) -> dict[str, object]:
    with start(tmp_path / "log", Path("org/target"), Path("org/draft"), settings={**settings, **OFFLINE}) as server:
        [model] = httpx.get(f"{server.base}/v1/models", timeout=60).json()["data"]
        assert model["id"] == "org/target"
        found = httpx.post(f"{server.base}/v1/completions", json=QUESTION, timeout=120)
        assert found.status_code == 200, found.text
        body: dict[str, object] = found.json()
        return body


@pytest.fixture
def models(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "models" / "org" / "target", "llama", 1)
    save_checkpoint(tmp_path / "models" / "org" / "draft", "qwen3", 2)
    return tmp_path / "models" / "org"


def test_a_pulled_pair_answers_without_a_network(tmp_path: Path, models: Path) -> None:
    with hub_of() as hub:
        for name in ("target", "draft"):
            hub.add(f"org/{name}", models / name)
        settings = hub.variables(tmp_path / "huggingface")
        command = [sys.executable, "-m", "mlx_specprefill_server", "pull", "org/target", "--draft", "org/draft"]
        subprocess.run(command, env={**os.environ, **settings}, check=True, timeout=240)
    body = answer(tmp_path, settings)
    assert body["usage"]["completion_tokens"] > 0
    assert body["specprefill"]["prompt_tokens"] == 90
