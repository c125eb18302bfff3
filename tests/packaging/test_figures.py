"""Every number in a table of the README or of a page beside it, and its source in `docs/results.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))["tables"]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
NUMBER = re.compile(r"(?<![\w.-])\d*\.?\d+(?![\w-])")
# What says that a number was measured: some of several, a share, a factor. Limits and settings have a unit.
MEASURED = re.compile(r"\b\d+ (?:right answers |of )[^|]*?\bof \d+|\b\d+ of \d+\b|(?<![\w.])\.\d+\b|\b[\d.]+ times\b")
OWN_TESTS = {"docs/results.md", "docs/machines.md"}  # written from JSON files, or held to one
REAL = {"table": "A real pair", "columns": ["task", "2048, in full"]}
SPEED = {"table": "Speed", "columns": ["pair"]}
SHAPES = {"table": "Speed", "columns": ["shape"]}
PEERS = {"table": "Beside other servers", "columns": ["seconds"]}
AGENTS = {"table": "Agents", "columns": ["pair"]}
Wanted = dict[str, object]


def rows(wanted: Wanted) -> list[list[str]]:
    """The rows of the one table of that title whose columns begin so."""
    columns = wanted["columns"]
    assert isinstance(columns, list)
    found = [t for t in TABLES if t["table"] == wanted["table"] and t["columns"][: len(columns)] == columns]
    assert len(found) == 1
    return [[cell.replace("*", "") for cell in row] for row in found[0]["rows"]]


def row(wanted: Wanted, *begins: str) -> list[str]:
    """The numbers behind the first cells of the one row that begins so."""
    found = [cells for cells in rows(wanted) if cells[: len(begins)] == list(begins)]
    assert len(found) == 1
    return found[0][len(begins) :]


def speed(*begins: str) -> Callable[[], list[str]]:
    """Tokens, seconds in full and sparse, and their ratio."""
    return lambda: [begins[1], *row(SPEED, *begins)[:3]]


def shape(name: str, draft: str, tokens: str) -> Callable[[], list[str]]:
    return lambda: [tokens, row(SHAPES, name, draft, tokens)[0]]


def right_answers() -> list[str]:
    """In full, and with a quarter kept, without the questions about code; of 4096 tokens."""
    six = [cells for cells in rows(REAL) if cells[0] != "code_qa"]
    assert len(six) * 32 == 192
    return [str(sum(int(cells[column]) for cells in six)) for column in (5, 7)]


def right_with_headings() -> list[str]:
    """The questions about code that are right in full, and those of them right since lines below a heading are kept."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    said = re.search(r"\*\*(\d+) instead of (\d+) of\s+the (\d+) questions", page)
    assert said is not None
    full, *_, quarter = row(REAL, "code_qa")[4:]
    assert said.groups()[1:] == (quarter, full)
    return [full, said[1]]


def read_in_sessions() -> list[str]:
    shares = [float(share) for cells in rows(AGENTS) for cell in cells for share in re.findall(r"\((\.\d+)\)", cell)]
    return ["100", f"{min(shares) * 100:.0f}", f"{max(shares) * 100:.0f}"]


def peers(first: str) -> Callable[[], list[str]]:
    return lambda: row(PEERS, first)[:4]


CODER, LLAMA, QWEN, OSS = "qwen2.5-coder", "llama-3.1-8b", "qwen3-32b, 40 of 64 layers", "gpt-oss-120b, 8 of 36 layers"
SOURCES: dict[str, Callable[[], list[str]]] = {
    "two x86 cores | SmolLM2 135M, its first 7 layers with heads trained here | 4096": speed("smollm2", "4096"),
    "two x86 cores | Qwen2.5-Coder 1.5B, 0.5B | 4096": speed(CODER, "4096"),
    "NVIDIA H200 | Qwen2.5-Coder 1.5B, 0.5B | 4096": speed("the same, H200", "4096"),
    "NVIDIA H200 | Qwen2.5-Coder 1.5B, 0.5B | 30000": speed("the same, H200", "30000"),
    "NVIDIA H100 | Llama 3.1 8B, 1B, random weights | 8192": shape(LLAMA, "1B", "8192"),
    "NVIDIA H100 | Llama 3.1 8B, 1B, random weights | 65536": shape(LLAMA, "1B", "65536"),
    "NVIDIA H100 | Qwen3 32B (40 of 64 layers), 0.6B, random weights | 8192": shape(QWEN, "0.6B", "8192"),
    "NVIDIA H100 | Qwen3 32B (40 of 64 layers), 0.6B, random weights | 65536": shape(QWEN, "0.6B", "65536"),
    "NVIDIA H100 | gpt-oss-120b (8 of 36 layers), 20B, random weights | 32768": shape(OSS, "20B", "32768"),
    "right answers to 192 questions": right_answers,
    "the same, 25 questions about code": right_with_headings,
    "what the target reads in a whole session": read_in_sessions,
    "to the first word, 8192 tokens": peers("8192 tokens"),
    "to the first words of a coding agent's session": peers("a session"),
}  # the beginning of a row: the numbers of its figures


def figures() -> Iterator[tuple[str, list[str]]]:
    """Each row of the README's tables that has a number behind its words, with these numbers."""
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| |"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = [
            number for cell in cells[1:] if not re.search("[A-Za-z]{4}", cell) for number in NUMBER.findall(cell)
        ]
        if numbers:
            yield line.strip("| "), numbers


@pytest.mark.parametrize(("line", "numbers"), list(figures()))
def test_a_figure_of_the_readme_is_a_result(line: str, numbers: list[str]) -> None:
    sources = [source for begins, source in SOURCES.items() if line.startswith(begins)]
    assert len(sources) == 1, f"no one source for: {line}"
    assert [float(number) for number in numbers] == [float(number) for number in sources[0]()]


@pytest.mark.extended
@pytest.mark.parametrize("page", ["README.md", "models/README.md", "scripts/env.sh", *DOCUMENTS])
def test_the_size_of_the_first_download_is_one_number(page: str, smollm2: Path) -> None:
    """In millions of bytes, as file managers show it."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    said = re.findall(r"(?:SmolLM2|smollm2|chat model)[^.]{0,120}? (\d+) MB", text)
    assert {float(number) for number in said} <= {round(smollm2.stat().st_size / 1e6)}


def test_the_readme_asks_mac_users_for_five_minutes() -> None:
    """With the commands that the pages of measurements name."""
    asked = (ROOT / "README.md").read_text(encoding="utf-8").partition("has not run on a Mac")[2].partition("\n\n")[0]
    assert "`mlx-specprefill doctor --compute`" in asked
    assert "`mlx-specprefill bench --submit .`" in asked


def measured_rows() -> Iterator[tuple[str, list[str]]]:
    """Each row of a table of the guides, concepts and decisions that has a measured number, with these numbers."""
    for page in DOCUMENTS:
        if page.startswith(("docs/reference/", "docs/clients/")) or page in OWN_TESTS:
            continue
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if line.startswith("| ") and MEASURED.search(line):
                yield line.strip("| "), [number for pair in MEASURED.findall(line) for number in NUMBER.findall(pair)]


def right_in_other_words() -> list[str]:
    """With a quarter of 4096 tokens kept: facts in other words, of 32, and the questions about code that are right."""
    full, now = right_with_headings()
    return [row(REAL, "paraphrase")[6], "32", now, full]


ELSEWHERE: dict[str, Callable[[], list[str]]] = {"the same in other words": right_in_other_words}


@pytest.mark.parametrize(("line", "numbers"), list(measured_rows()))
def test_a_measured_number_of_another_page_is_a_result(line: str, numbers: list[str]) -> None:
    sources = [source for begins, source in ELSEWHERE.items() if line.startswith(begins)]
    assert len(sources) == 1, f"no one source for: {line}"
    assert numbers == sources[0]()


def test_the_predicted_shares_are_those_of_the_formula() -> None:
    """The one of the cost model: with a draft r + k, at the k that the page names."""
    page = " ".join((ROOT / "docs" / "guides" / "models.md").read_text(encoding="utf-8").split())
    kept = re.search(r"Predicted for k = (0\.\d+), not measured:", page)
    assert kept is not None
    stated = re.findall(r"(?:takes )?(0\.\d\d)(?: with Qwen3\.5-2B)? \(r = (0\.\d+)\)", page[kept.end() :])
    assert len(stated) == 1 + 1  # both pairs
    for share, r in stated:
        assert float(share) == pytest.approx(float(r) + float(kept[1]), abs=0.005)


def test_each_source_is_used() -> None:
    lines = [line for line, _ in figures()]
    assert [begins for begins in SOURCES if not any(line.startswith(begins) for line in lines)] == []
