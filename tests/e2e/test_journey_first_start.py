"""The first start: what the server says can be pasted, and is answered."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.serving import start

from .conftest import PAIR
from .test_start import KNOWN, wait_for


@pytest.mark.extended
def test_what_it_says_when_it_is_ready_can_be_pasted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with start(log, *PAIR, *KNOWN, "--model-alias", "mine", "--api-key", "geheim", "--host", "0.0.0.0") as server:
        wait_for(log, server.process, "curl ")
        said = log.read_text()
        assert "serving mine: draft draft, sparse where a prompt is longer than 512 tokens, context " in said
        example = next(line.partition("curl ")[2] for line in said.splitlines() if "curl " in line)
        command = ["sh", "-c", f"curl --fail {example}"]
        answer = subprocess.check_output(command, env={**os.environ, "KEY": "geheim"}, timeout=120)
    assert json.loads(answer)["model"] == "mine"
    assert "geheim" not in said
    assert "http://localhost:" in example
