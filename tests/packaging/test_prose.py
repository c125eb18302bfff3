"""The documents' sentences: one statement each. The first words of the product's docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = tuple(f"docs/{name}" for name in ("decisions/", "machines.md", "reference/cli.md", "reference/settings.md"))
OTHERS += ("docs/reference/supported-models.md", "docs/reference/templates.md")  # tables of short notes
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "models/README.md")]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if not str(path.relative_to(ROOT)).startswith(OTHERS)]
# Programs, what `connect` prints, inline code and addresses.
NO_PROSE = re.compile(r"^ *```.*?^ *```$|<!-- connect.*?<!-- end -->|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )|\n?\|")  # a paragraph, an item of a list, a cell of a table
SENTENCE = re.compile(r"(?<=[.!?:])[*_]*\s+(?=[A-Z\d*\[(])")
INDIRECT = re.compile(r"(?:What|Of|Those|Whether|How|Which|Who|Where|When|That)\b")
LONG = re.compile(r";|\bthat\b.*\bthat\b", re.IGNORECASE)


def sentences(text: str) -> Iterator[str]:
    for block in BLOCK.split(NO_PROSE.sub("…", text)):
        yield from SENTENCE.split(" ".join(block.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_has_one_statement(page: Path) -> None:
    """Make two of one with a semicolon or with two of "that"."""
    assert list(filter(LONG.search, sentences(page.read_text(encoding="utf-8")))) == []


def test_long_sentences_are_seen() -> None:
    prose = "One is short. A word; another.\n\n| that it is | that |\n\n- `a; b` and what that is that\n  it is.\n"
    text = f"{prose}```sh\na; b\n```\n"
    assert list(filter(LONG.search, sentences(text))) == ["A word; another.", "- … and what that is that it is. …"]


@pytest.mark.parametrize("package", ["mlx_specprefill", "server"])
def test_a_docstring_begins_with_what_it_describes(package: str) -> None:
    """A verb or a noun, by which a reader of first lines finds the place of a decision."""
    nodes = [node for path in (ROOT / package).rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    described = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    found = [text for node in described if (text := ast.get_docstring(node))]
    assert [text for text in found if INDIRECT.match(text)] == []
    assert len(found) > 1000
