"""Docstrings say what a function does ("Return the ...") or what a class or module is."""

from __future__ import annotations

import ast
import re
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
    found = {str(file): openings_in(file.read_text()) for file in (ROOT / folder).rglob("*.py")}
    assert found
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_such_openings_are_found() -> None:
    assert openings_in('"""Of a row."""\ndef f():\n    """Whether it fits."""\ndef g():\n    """Offer it."""\n') == [
        "Of a row.",
        "Whether it fits.",
    ]
