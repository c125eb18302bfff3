"""Docstrings say what a function does ("Return the ...") or what a class or module is."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPENING = re.compile(r"(What|Of|Those|Whether|How|Who|Whose|Whom)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def openings_in(source: str) -> list[str]:
    """Return the first lines of docstrings that begin with a question word, "Of" or "Those"."""
    docs = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    return [doc.splitlines()[0] for doc in docs if doc and OPENING.match(doc)]


@pytest.mark.parametrize("folder", ["mlx_specprefill", "server", "scripts", "tests"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    listed = subprocess.check_output(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, text=True).split()
    assert listed
    found = {name: openings_in((ROOT / name).read_text()) for name in listed if (ROOT / name).exists()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_such_openings_are_found() -> None:
    assert openings_in('"""Of a row."""\ndef f():\n    """Whether it fits."""\ndef g():\n    """Offer it."""\n') == [
        "Of a row.",
        "Whether it fits.",
    ]
