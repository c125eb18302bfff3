"""Every number in a table of the README or of a page beside it, and its source in `docs/results.json`."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_specprefill import EngineConfig
from mlx_specprefill.engine import chunks
from mlx_specprefill_evals.statistics import DENSE_FLOOR

ROOT = Path(__file__).resolve().parents[2]
TABLES = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))["tables"]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
NUMBER = re.compile(r"(?<![\w.-])\d*\.?\d+(?![\w-])")
# What says that a number was measured: some of several, a share, a factor. Limits and settings have a unit.
MEASURED = re.compile(
    r"\b\d+ (?:right answers |of )[^|]*?\bof \d+|\b\d+ of \d+\b|(?<![\w.])\.\d+\b|\b[\d.]+ times\b|\b\d+ %"
)
GAIN = re.compile(r"\b\d[\d.]*(?: (?:to|and|or) \d[\d.]*)? times\b")
SHARE = re.compile(r"(?<![\w.])\.\d+\b")
COUNTED = re.compile(r"\b\d+ of (?:the )?\d+\b")
RATE = re.compile(r"\b\d[\d.]* tokens(?:/s| per second| a second)")
TIME = re.compile(r"(?<![\w.])\d[\d.]*(?: to \d[\d.]*)? (?:ms|s|seconds)\b")
# A time is measured where something took it; it is a setting where something waits for it or has it as its limit.
TOOK = re.compile(r"\b(?:take|takes|took|after|without|instead of)\b")
SETTING = re.compile(r"`--|`specprefill|`/|[Aa]fter \d+ seconds|\bevery \d|failure|\bhangs\b|\bsteps? of\b")
OTHERS = re.compile(r"\b(?:issues?|pull requests?) \d|arXiv|\]\(https?:")
DEDUCED = re.compile(r"\bpredicted\b|\bat best\b|\bsuch a step\b")  # by a formula that stands beside it
OWN_TESTS = {"docs/results.md", "docs/machines.md"}  # written from JSON files, or held to one
REAL = {"table": "A real pair", "columns": ["task", "2048, in full"]}
SPEED = {"table": "Speed", "columns": ["pair"]}
SHAPES = {"table": "Speed", "columns": ["shape"]}
PEERS = {"table": "Beside other servers", "columns": ["seconds"]}
AGENTS = {"table": "Agents", "columns": ["pair"]}
Wanted = dict[str, object]
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z\d`*\[])")
CODE_OR_LINK = re.compile(r"`[^`]*`|\]\([^)]*\)")
SPELLED = {"two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0, "ten": 10.0}
# A spelled number is a figure beside a unit.
FIGURE = re.compile(rf"{NUMBER.pattern}|\b(?:{'|'.join(SPELLED)})(?= (?:seconds|minutes|times)\b)", re.IGNORECASE)
PERCENT = re.compile(r"\b\d+(?= %)")
DEFAULTS = EngineConfig()
KEPT = float(DEFAULTS.policy.keep_pct)
STEP_S = DEFAULTS.target_itl_ms / 1000


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


def blocks(page: str) -> Iterator[str]:
    """The paragraphs and items of a page, without programs, what they print, tables and code."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )", text):
        if not block.lstrip().startswith(("|", ">", "#", "    ")):
            yield " ".join(block.split())


def gain(share: float) -> float:
    """Return the factor by which the first word comes sooner, for a cost that is this share of full reading."""
    return round(1 / share, 1)


def oldest_python() -> list[float]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [float(project["requires-python"].removeprefix(">="))]


# The figures of the README's running text, by words of their sentence: results are in its tables only. What has no
# value here is no figure, or another test knows it.
PROSE: dict[str, Callable[[], list[float]] | str] = {
    "takes half of the target's time allows": lambda: [gain(0.5 + KEPT)],
    "is scored by 20 of its 30 layers": lambda: [20, 30, gain(20 / 30 + KEPT * (1 - 20 / 30))],
    "with Python 3.11 or newer": oldest_python,
    "read in steps of some two seconds alone": lambda: [chunks._ALONE_MS / 1000, STEP_S],
    "takes such a step, so that": lambda: [12, round(12 * STEP_S, 1)],
    "Please lend five minutes": "a wish",
    "a small English chat model of": "test_the_size_of_the_first_download_is_one_number",
}


def prose(page: str) -> Iterator[str]:
    """The sentences of a page's running text, without code and addresses."""
    for block in blocks(page):
        if not OTHERS.search(block):
            yield from SENTENCE.split(CODE_OR_LINK.sub("", block))


@pytest.mark.parametrize("sentence", [text for text in prose("README.md") if FIGURE.search(text)])
def test_a_figure_of_the_readmes_running_text_has_a_source(sentence: str) -> None:
    sources = [source for words, source in PROSE.items() if words in sentence]
    assert len(sources) == 1, f"no one source for: {sentence}"
    if not isinstance(sources[0], str):
        said = [SPELLED.get(number.lower(), number) for number in FIGURE.findall(sentence)]
        assert list(map(float, said)) == sources[0]()


# Shares in running text that are settings or rules, by words of their sentence. No other share has a % there.
SHARES = {
    "by default (`specprefill_keep_pct`)": KEPT,
    "of the uncached tokens are forced": float(DEFAULTS.selection.max_forced_share),
    "A fixed share of": KEPT,
    "No difference is printed where full prefill is right in less than": DENSE_FLOOR,
}


@pytest.mark.parametrize("page", ["README.md", *DOCUMENTS])
def test_a_percentage_in_running_text_is_a_setting(page: str) -> None:
    if page.startswith(("docs/reference/", "docs/clients/")) or page in OWN_TESTS:
        return
    for block in blocks(page):
        for sentence in SENTENCE.split(block):
            found = [] if OTHERS.search(block) else PERCENT.findall(sentence)
            if found:
                shares = [f"{share * 100:.0f}" for words, share in SHARES.items() if words in sentence]
                assert found == shares, f"{page}: {sentence}"


def test_no_source_is_left_without_its_sentence() -> None:
    texts = [" ".join(blocks(page)) for page in ("README.md", *DOCUMENTS)]
    assert [words for words in (*PROSE, *SHARES) if not any(words in text for text in texts)] == []


def test_each_source_is_used() -> None:
    lines = [line for line, _ in figures()]
    assert [begins for begins in SOURCES if not any(line.startswith(begins) for line in lines)] == []


def measured(sentence: str) -> list[str]:
    """The figures that somebody measured: gains, shares, counts, rates, and times that something took."""
    words = re.sub(r"\(r = [\d.]+\)", "", sentence)
    found = [figure for kind in (GAIN, SHARE, COUNTED, RATE) for figure in kind.findall(words)]
    if TOOK.search(words) and not SETTING.search(words):
        found += TIME.findall(words)
    return [number for figure in found for number in NUMBER.findall(figure)]


def sentences() -> Iterator[tuple[str, str, list[str]]]:
    """Each block of running text with a sentence of measured figures: its page, the block, and these figures."""
    for page in ("README.md", *DOCUMENTS):
        if page.startswith(("docs/reference/", "docs/clients/")) or page in OWN_TESTS:
            continue
        for block in blocks(page):
            if OTHERS.search(block):  # who measured it is named
                continue
            for sentence in SENTENCE.split(block):
                numbers = measured(sentence)
                if numbers and not DEDUCED.search(sentence):
                    yield page, block, numbers


def sections() -> dict[str, set[float]]:
    """The numbers below each heading of the page of results, which has its own tests, by the heading's anchor."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    parts = re.split(r"^(#+ .+)$", page, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in parts[1::2]]
    return {
        anchor: {float(number) for number in NUMBER.findall(text)}
        for anchor, text in zip(anchors, parts[2::2], strict=True)
    }


@pytest.mark.parametrize(("page", "block", "numbers"), list(sentences()))
def test_a_figure_in_running_text_is_in_the_results_it_links_to(page: str, block: str, numbers: list[str]) -> None:
    """Delete a figure that can't be traced, or measure it, and write it into the results."""
    known: set[float] = set()
    for anchor in re.findall(r"results\.md#([\w-]+)", block):
        known |= sections()[anchor]
    assert [number for number in numbers if float(number) not in known] == [], f"{page}: {block}"


@pytest.mark.parametrize(
    ("sentence", "numbers"),
    [
        ("It gains 3.2 times.", ["3.2"]),
        ("A step took 1.09 to 1.15 times as long.", ["1.09", "1.15"]),
        ("It keeps .85 of the answers.", [".85"]),
        ("It is right in 16 of 18 answers.", ["16", "18"]),
        ("The first takes 18 to 35 s, then it decodes 60 tokens/s.", ["60", "18", "35"]),
        ("After 120 seconds it gives up, and it starts again 30 s after a failure.", []),
        ("A chunk takes `--target-itl-ms` (200 ms).", []),
        ("It keeps 20 % of 4096 tokens in 7 layers.", []),
    ],
)
def test_measured_figures_are_told_from_settings(sentence: str, numbers: list[str]) -> None:
    assert measured(sentence) == numbers
