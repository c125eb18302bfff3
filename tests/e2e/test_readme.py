"""The programs and commands of the README and of the documents' first page, as they stand there, on the real model: a
real text, a sparse prefill, a right answer. Every other block, of these and of the other documents: test_documents.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Server, start_named

README = Path(__file__).parents[2] / "README.md"
START = README.parent / "docs" / "index.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"
FIRST = re.compile(r"python3 -c '\n(.*?)' \| curl.*?python3 -c '\n(.*?)'$", re.DOTALL | re.MULTILINE)

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("readme") / "log"
    with start_named(log, "smollm2", "--densify", "off") as running:  # idle work takes time from the next test
        yield running


def test_the_first_answer_is_right_and_the_prefill_was_sparse(server: Server) -> None:
    """The two programs of the first page's command, and its request between them."""
    found = FIRST.search(START.read_text(encoding="utf-8"))
    request = subprocess.run([sys.executable, "-c", found[1]], capture_output=True, check=True).stdout
    answer = httpx.post(f"{server.base}/v1/chat/completions", content=request, timeout=800)
    done = subprocess.run([sys.executable, "-c", found[2]], input=answer.content, capture_output=True, check=True)
    said, report = done.stdout.decode().splitlines()
    assert "Digital Creations" in said
    counts = re.match(r"sparse - (\d+) of (\d+) tokens kept, first token after", report)
    assert counts is not None, report
    assert int(counts[1]) < int(counts[2]) / 4
    assert int(counts[2]) > 2000


@pytest.mark.parametrize("program", [text for language, text in BLOCKS if language == "python"])
def test_the_programs_print_what_their_comments_say(server: Server, program: str) -> None:
    text = program.replace(ADDRESS, server.base)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=800)
    answer, report = done.stdout.splitlines()
    assert f"print(answer.choices[0].message.content)  # {answer}\n" in program
    assert "'mode': 'sparse'" in report
    for kept, tokens in re.findall(r"some (\d+) of (\d+) prompt tokens", program):
        counts = ast.literal_eval(report)
        assert counts["prompt_tokens"] == int(tokens)
        assert abs(counts["kept_tokens"] - int(kept)) <= 10  # "some"


@pytest.mark.parametrize("command", [text for _, text in BLOCKS if text.startswith("curl ")])
def test_the_commands_are_answered(server: Server, command: str) -> None:
    text = command.replace(ADDRESS, server.base)
    done = subprocess.run(["sh", "-euc", text], capture_output=True, text=True, check=True, timeout=800)
    assert "Paris" in done.stdout
