"""The generated reference says what the code says, and the pages of folders are listed on their index."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
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
    assert set(re.findall(r"<!-- connect (\S+) -->", written)) == set(reference.AGENTS)


def test_the_reference_has_every_setting_and_command(reference: ModuleType) -> None:
    pages = reference.pages()
    assert "| `MLX_SPECPREFILL_MEMORY_LIMIT` | `--memory-limit` | none | For weights" in pages["settings.md"]
    assert "| `MLX_SPECPREFILL_PREFIX_DISK_SIZE` | `--prefix-disk-size` | 20GB |" in pages["settings.md"]
    models = ["pull", "list", "recommend"]
    commands = ["serve", *models, "connect", "generate", "inspect", "bench", "warm", "doctor"]
    services = [f"service {name}" for name in ("install", "uninstall")]
    assert re.findall(r"^## ([\w ]+)$", pages["cli.md"], re.MULTILINE) == [*commands, *services, "eval"]


def listed(folder: str) -> list[str]:
    return re.findall(
        r"^\|.*?\]\(([\w.-]+\.md)\)", (DOCS / folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )


@pytest.mark.parametrize("folder", ["decisions", "experiments"])
def test_every_page_is_on_the_index_of_its_folder(folder: str) -> None:
    pages = {path.name for path in (DOCS / folder).glob("*.md")} - {"README.md"}
    assert sorted(listed(folder)) == sorted(pages)


def test_experiments_are_newest_first_and_begin_with_a_date_and_a_verdict() -> None:
    pages = [(DOCS / "experiments" / name).read_text(encoding="utf-8") for name in listed("experiments")]
    dates = [re.match(r"# .+\n\n\*(\d{4}-\d\d-\d\d)\.\* \*\*Verdict: ", page) for page in pages]
    assert all(dates)
    found = [date[1] for date in dates if date is not None]
    assert found == sorted(found, reverse=True)
