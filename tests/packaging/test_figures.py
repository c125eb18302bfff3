"""Every measured figure of the README and of the documents, and its source in `docs/results.json`.

The tables of `docs/results.md` are `tables` there. `text` has an entry for each other place: the beginning of a row of
a table or of a block of running text, its figures in order, and the table that has their date, command and machine, or
these themselves. A figure that stands elsewhere in the file is a path: a table's title, which one of that title, row,
cell, and which number of the cell; or page, beginning and place of another entry's figure. A list is a sum of paths.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import EngineConfig
from mlx_specprefill.engine.reading import chunks
from mlx_specprefill_evals.statistics import DENSE_FLOOR

ROOT = Path(__file__).resolve().parents[2]
RESULTS = json.loads((ROOT / "docs" / "results.json").read_text(encoding="utf-8"))
TEXT = RESULTS["text"]
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
NUMBER = re.compile(r"(?<![\w.-])\d*\.?\d+(?![\w-])")
SIGNED = re.compile(r"(?<![\w.\-/])[-+]?\d*\.?\d+(?: \d{3})*(?![\w-])(?!\.\d)")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
# What says that a number was measured: some of several, a share, a factor. Limits and settings have a unit.
MEASURED = re.compile(
    r"\b\d+ (?:right answers |of )[^|]*?\bof \d+|\b\d+ of \d+\b|(?<![\w.])\.\d+\b|\b[\d.]+ times\b|\b\d+ %"
)
GAIN = re.compile(r"\b\d[\d.]*(?: (?:to|and|or) \d[\d.]*)? times\b")
SHARE = re.compile(r"(?<![\w.])\.\d+\b")
COUNTED = re.compile(r"\b\d+ of (?:the )?\d+\b")
RATE = re.compile(r"\b\d[\d.]*(?: to \d[\d.]*)? (?:tokens|MB)(?:/s| per second| a second)")
CHANGE = re.compile(r"\bfrom \d[\d.]* to \d[\d.]* [KMG]B\b|\b[\d.]+ to [\d.]+ relative error|\bin \d+ sessions\b")
TIME = re.compile(r"(?<![\w.])\d[\d.]*(?: to \d[\d.]*)? (?:ms|s|seconds)\b")
# A time is measured where something took it; it is a setting where something waits for it or has it as its limit.
TOOK = re.compile(r"\b(?:take|takes|took|after|without|instead of)\b")
SETTING = re.compile(r"`--|`specprefill|`/|[Aa]fter \d+ seconds|\bevery \d|failure|\bhangs\b|\bsteps? of\b")
ARCHITECTURES = re.compile(r"\b\d+ (?:of (?:the )?\d+ )?(?:architectures|\]?model files)")
OTHERS = re.compile(r"\b(?:issues?|pull requests?) \d|arXiv|\]\(https?:")
DEDUCED = re.compile(r"\bat best\b|\bsuch a step\b")  # by a formula that stands beside it
MEASUREMENTS = "docs/results.md"  # every number of its text has a source
GENERATED = ("docs/machines.md", "docs/reference/supported-models.md")  # from files of measurements
REFERENCE = ("docs/reference/", "docs/clients/")  # their tables have settings and limits
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z\d`*\[])")
CODE_OR_LINK = re.compile(r"`[^`]*`|\]\([^)]*\)")
SPELLED = {"two": 2.0, "three": 3.0, "four": 4.0, "five": 5.0, "six": 6.0, "ten": 10.0}
# A spelled number is a figure beside a unit.
FIGURE = re.compile(rf"{NUMBER.pattern}|\b(?:{'|'.join(SPELLED)})(?= (?:seconds|minutes|times)\b)", re.IGNORECASE)
PERCENT = re.compile(r"\b\d+(?= %)")
DEFAULTS = EngineConfig()
KEPT = float(DEFAULTS.policy.keep_pct)
STEP_S = DEFAULTS.target_itl_ms / 1000


def of_path(path: str) -> float:
    """Return the number that a path leads to, of a table or of another place."""
    if path.startswith("docs/"):
        place, _, which = path.rpartition("/")
        (found,) = [entry for entry in TEXT if f"{entry['page']}/{entry['begins']}" == place]
        return value(found["figures"][int(which)])
    title, number, row, column, *rest = path.split("/")
    cell = tables(title)[int(number)]["rows"][int(row)][int(column)]
    return numbers_of(cell)[int(rest[0]) if rest else 0]


def tables(title: str) -> list[Any]:
    return [table for table in RESULTS["tables"] if table["table"] == title]


def numbers_of(text: str) -> list[float]:
    """Return every number of a text, without code, addresses, dates and numbers of decisions."""
    text = re.sub(r"\bdecision \d+", "", DATE.sub("", CODE_OR_LINK.sub("", text)))
    return [float(number.replace(" ", "")) for number in SIGNED.findall(text)]


def value(figure: float | str | list[str]) -> float:
    if isinstance(figure, list):
        return sum(map(of_path, figure))
    return of_path(figure) if isinstance(figure, str) else figure


def figures() -> Iterator[tuple[str, list[float]]]:
    """Each row of the README's tables that has a number behind its words, with these numbers."""
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| |"):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        numbers = [float(n) for cell in cells[1:] if not re.search("[A-Za-z]{4}", cell) for n in NUMBER.findall(cell)]
        if numbers:
            yield line.strip("| "), numbers


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
    "takes half of the target's time": lambda: [gain(0.5 + KEPT)],
    "Without these heads 20 of its 30 layers": lambda: [20, 30, gain(20 / 30 + KEPT)],
    "With Python 3.11 or newer": oldest_python,
    "a prompt is read in steps of": lambda: [STEP_S, chunks._ALONE_MS / 1000],
    "each running answer gets one token": lambda: [12, round(12 * STEP_S, 1)],
    "A table for 16 to 128 GB": "tests/cli/test_listing.py",
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
    if page.startswith(REFERENCE) or page in (MEASUREMENTS, *GENERATED):
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


def measured(sentence: str) -> list[str]:
    """The figures that somebody measured: gains, shares, counts, rates, and times that something took."""
    words = re.sub(r"\(r = [\d.]+\)", "", sentence)
    found = [figure for kind in (GAIN, SHARE, COUNTED, RATE, CHANGE) for figure in kind.findall(words)]
    if TOOK.search(words) and not SETTING.search(words):
        found += TIME.findall(words)
    return [number for figure in found for number in NUMBER.findall(figure)]


def numbers_of_block(page: str, block: str) -> list[float]:
    """Return all numbers of the page of results, elsewhere those of a block that says what was measured."""
    if page != MEASUREMENTS and OTHERS.search(block):  # who measured it is named
        return []
    says = (not DEDUCED.search(sentence) and measured(sentence) for sentence in SENTENCE.split(block))
    return numbers_of(block) if page == MEASUREMENTS or any(says) else []


def numbers_of_row(line: str) -> list[float]:
    return [float(number) for figure in MEASURED.findall(line) for number in NUMBER.findall(figure)]


def places() -> Iterator[tuple[str, str, list[float]]]:
    """Each row and block of a page with measured figures, and these. Tables of results are held to their data."""
    yield from (("README.md", *row) for row in figures())
    for page in DOCUMENTS:
        if page in GENERATED:
            continue
        found = [(block, numbers_of_block(page, block)) for block in blocks(page)]
        if page != MEASUREMENTS and not page.startswith(REFERENCE):
            lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
            found += [(line.strip("| "), numbers_of_row(line)) for line in lines if line.startswith("| ")]
        yield from ((page, text, numbers) for text, numbers in found if numbers)


PLACES = list(places())


@pytest.mark.parametrize(("page", "text", "numbers"), PLACES)
def test_a_measured_figure_has_a_source(page: str, text: str, numbers: list[float]) -> None:
    """Measure one that has none, and write it into the file of results, or delete it."""
    sources = [entry for entry in TEXT if page == entry["page"] and text.startswith(entry["begins"])]
    assert len(sources) == 1, f"{page}: no one source for: {text}"
    assert numbers == [value(figure) for figure in sources[0]["figures"]], f"{page}: {text}"


@pytest.mark.parametrize("entry", TEXT, ids=lambda entry: f"{entry['page']}: {entry['begins']}")
def test_a_source_is_used_and_has_a_date_and_a_command(entry: dict[str, Any]) -> None:
    texts = [text for page, text, _ in PLACES if page == entry["page"] and text.startswith(entry["begins"])]
    title, _, number = entry.get("run", "").rpartition("/")
    run = tables(title)[int(number)] if title else entry
    assert len(texts) == 1
    assert set(DATE.findall(texts[0])) <= {run["date"]}
    assert run["command"]


# Numbers of architectures in running text, by words beside them.
COUNTS = {
    "Tests show that on": ("sparse",),
    "exact with respect to the masked target, for": ("sparse", None),
    "subclasses of": (None,),
}


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "models/README.md", *DOCUMENTS])
def test_a_number_of_architectures_is_that_of_the_verified_ones(page: str) -> None:
    rows = json.loads((ROOT / "mlx_specprefill/adapters/verified.json").read_text(encoding="utf-8")).values()
    for block in [] if page in GENERATED else blocks(page):
        for sentence in filter(ARCHITECTURES.search, SENTENCE.split(block)):
            kinds = [kinds for words, kinds in COUNTS.items() if words in sentence]
            assert len(kinds) == 1, f"{page}: {sentence}"
            known = [sum(kind not in row["refusals"] for row in rows) for kind in kinds[0]]
            found = ARCHITECTURES.search(sentence)
            assert numbers_of(found[0]) == known, sentence


@pytest.mark.parametrize(
    ("sentence", "numbers"),
    [
        ("It gains 3.2 times.", ["3.2"]),
        ("A step took 1.09 to 1.15 times as long.", ["1.09", "1.15"]),
        ("It keeps .85 of the answers.", [".85"]),
        ("It is right in 16 of 18 answers.", ["16", "18"]),
        ("It repacks 50 to 150 MB per second.", ["50", "150"]),
        ("A first request fell from 42 to 17 KB.", ["42", "17"]),
        ("The first takes 18 to 35 s, then it decodes 60 tokens/s.", ["60", "18", "35"]),
        ("After 120 seconds it gives up, and it starts again 30 s after a failure.", []),
        ("A start takes `--option` (200 ms).", []),
        ("It keeps 20 % of 4096 tokens in 7 layers.", []),
    ],
)
def test_measured_figures_are_told_from_settings(sentence: str, numbers: list[str]) -> None:
    assert measured(sentence) == numbers
