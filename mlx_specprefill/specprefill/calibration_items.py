"""Questions with known answers in real text, to calibrate a draft's heads.

Three kinds: copy a sentence of the text, a code inserted into it (needle), and a fact whose question shares no word
with it (paraphrase). The text is docstrings of the standard library, so none has to be shipped.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["KINDS", "CalibrationItem", "calibration_items"]

KINDS = ("copy", "needle", "paraphrase")
_MODULES = (
    "argparse threading subprocess logging difflib textwrap shutil zipfile tarfile socket ssl pathlib random".split()
)
_SENTENCE = re.compile(r"[A-Z][^.\n]*(?:\n[^.\n]+)*\.")
_SYLLABLES = "ba ce di fo gu ha ki lo mu ne pa ri so tu va we zo".split()
# A fact and a question about it, without a shared content word.
_FACTS = (
    ("The ferry leaves the harbour at seven each morning.", "When does the boat depart every day?"),
    ("Marta keeps the spare key beneath the blue flowerpot.", "Where is the extra door opener hidden?"),
    ("The physician told Edwin to stop eating peanuts.", "Which food did his doctor forbid?"),
    ("Lucas repairs bicycles in a shed behind the bakery.", "What does the mechanic fix for a living?"),
    ("Our cat is afraid of the vacuum cleaner.", "What frightens the household pet?"),
    ("The museum purchased the painting for nine thousand dollars.", "How much money was paid for this artwork?"),
    ("Grandfather was born in a village near Krakow.", "Where did the old man come into the world?"),
    ("The committee postponed the election until October.", "To which month was voting moved?"),
    ("Heavy rain washed away the wooden bridge on Tuesday.", "Which weekday did a storm destroy that crossing?"),
    ("The pilot spoke Portuguese with the crew.", "In what language did the aviator talk to colleagues?"),
    ("Sarah swapped her piano for a pair of skis.", "What did the musician get in exchange for an instrument?"),
    ("The bakery closes early because the oven is broken.", "Why does the bread shop shut sooner than usual?"),
)


@dataclass(frozen=True)
class CalibrationItem:
    """A document, a question about it, and the passage with the answer."""

    kind: str
    document: str
    question: str
    gold: str


def calibration_items(number: int, characters: int, seed: int = 0) -> Iterator[CalibrationItem]:
    """Yield `number` items of each kind in turn, with documents of `characters` characters. Same Python, same items."""
    makers = {"copy": _copy, "needle": _needle, "paraphrase": _paraphrase}
    for index in range(number):
        for kind in KINDS:
            rng = random.Random(f"{kind}/{seed}/{index}")
            yield makers[kind](rng, _document(rng, characters))


@cache
def _passages() -> tuple[str, ...]:
    """Return docstrings in a fixed order."""
    found: list[str] = []
    for name in _MODULES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
            nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
            found += [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 120]
    return tuple(found) or tuple(fact for fact, _ in _FACTS)


def _document(rng: random.Random, characters: int) -> str:
    """Return consecutive docstrings of `characters` characters in total."""
    passages = _passages()
    start, parts, size = rng.randrange(len(passages)), list[str](), 0
    while size < characters:
        part = passages[(start + len(parts)) % len(passages)][: characters - size]
        parts.append(part)
        size += len(part) + 2
    return "\n\n".join(parts)


def _copy(rng: random.Random, text: str) -> CalibrationItem:
    found = [m.group() for m in _SENTENCE.finditer(text) if 15 <= len(m.group().split()) <= 40]
    unique = [sentence for sentence in found if text.count(sentence) == 1]
    if not unique:
        return _needle(rng, text)
    gold = rng.choice(unique)
    beginning = " ".join(gold.split()[:6])
    return CalibrationItem("copy", text, f'Copy the sentence of the text that begins with "{beginning}".', gold)


def _needle(rng: random.Random, text: str) -> CalibrationItem:
    name = "".join(rng.choices(_SYLLABLES, k=3)).capitalize()
    gold = f"The secret code for {name} is {rng.randrange(100000, 999999)}."
    return CalibrationItem("needle", _inserted(rng, text, gold), f"What is the secret code for {name}?", gold)


def _paraphrase(rng: random.Random, text: str) -> CalibrationItem:
    gold, question = rng.choice(_FACTS)
    return CalibrationItem("paraphrase", _inserted(rng, text, gold), question, gold)


def _inserted(rng: random.Random, text: str, line: str) -> str:
    """Insert the line anywhere but at the text's beginning."""
    lines = text.split("\n")
    lines.insert(rng.randint(1, max(1, len(lines) - 1)), line)
    return "\n".join(lines)
