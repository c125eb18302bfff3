"""The generated reference says what the code says, and the pages of folders are listed on their index."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "settings.md"])
def test_the_page_is_what_the_code_says(reference: ModuleType, name: str) -> None:
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert written == reference.pages()[name], "run scripts/make_reference.py"


def test_the_page_on_clients_has_what_connect_says(reference: ModuleType) -> None:
    written = (DOCS / "clients" / "README.md").read_text(encoding="utf-8")
    assert written == reference.clients_page(), "run scripts/make_reference.py"
    shown = re.findall(r"<!-- connect (\S+) -->", written)
    assert shown == ["claude", "codex", "vscode", "zed"], "launched ones and editors"
    assert [name for name in reference.AGENTS if f"`{name}`" not in written] == []


def test_the_reference_has_every_setting_and_command(reference: ModuleType) -> None:
    pages = reference.pages()
    assert "| `MLX_SPECPREFILL_MEMORY_LIMIT` | `--memory-limit` | none | Memory for weights" in pages["settings.md"]
    assert "| `MLX_SPECPREFILL_PREFIX_DISK_SIZE` | `--prefix-disk-size` | 20GB |" in pages["settings.md"]
    models = ["pull", "list", "recommend"]
    commands = ["serve", *models, "launch", "connect", "inspect", "bench", "doctor", "eval"]
    assert re.findall(r"^## ([\w ]+)$", pages["cli.md"], re.MULTILINE) == commands


def test_every_decision_is_on_the_index() -> None:
    folder = DOCS / "decisions"
    listed = re.findall(r"\]\((\d[\w.-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


def test_the_results_are_the_same_as_data() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    lines = [line for line in page.replace("**", "").splitlines() if line[:1] == "|" and line[:2] != "|-"]
    written = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    data = json.loads((DOCS / "results.json").read_text(encoding="utf-8"))
    assert written == [row for table in data["tables"] for row in (table["columns"], *table["rows"])]
