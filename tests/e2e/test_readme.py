"""The README's first question, asked as it stands there: a real model, a real text, a sparse prefill, a right
answer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving import start_named

README = Path(__file__).parents[2] / "README.md"


def first_request() -> bytes:
    """What the README's first command pipes into curl."""
    program = re.search(r"python3 -c '\n(.*?)' \| curl", README.read_text(encoding="utf-8"), re.DOTALL)
    assert program is not None
    return subprocess.run([sys.executable, "-c", program[1]], capture_output=True, check=True).stdout


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("smollm2")
def test_the_first_answer_is_right_and_the_prefill_was_sparse(tmp_path: Path) -> None:
    with start_named(tmp_path / "log", "smollm2", "--specprefill-threshold", "1024") as server:
        answer = httpx.post(f"{server.base}/v1/chat/completions", content=first_request(), timeout=800).json()
    assert "BeOpen.com" in answer["choices"][0]["message"]["content"]
    assert answer["specprefill"]["mode"] == "sparse"
    assert answer["usage"]["prompt_tokens"] > 2000
