"""Filler text of several kinds, and documents of any length around the facts."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from . import words

Count = Callable[[str], int]

# The noise of the published retrieval tasks: the same five sentences over and over.
NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# The demo pairs were trained on other modules.
PYTHON_MODULES = "bisect base64 chunk colorsys compileall filecmp linecache netrc nntplib sre_parse turtle".split()


def prose(rng: random.Random) -> str:
    """Return one sentence of templated prose, with a leading space."""
    return " " + words.fill(rng, rng.choice(words.FRAMES))


def salad(rng: random.Random) -> str:
    """Return one sentence of invented words."""
    return " " + " ".join(words.invented_word(rng) for _ in range(rng.randrange(4, 14))).capitalize() + "."


def listing(rng: random.Random) -> str:
    """Return a line of a log or list."""
    word, other = (words.invented_word(rng) for _ in range(2))
    number = rng.randrange(10 ** rng.randrange(1, 6))
    return rng.choice((
        f"\n{rng.randrange(10, 24)}:{rng.randrange(10, 60)} {word} {other} {number}",
        f"\n- {word}: {number}",
        f"\n{rng.randrange(1, 300)}. {word} {other}",
        f"\n[{word}] {other} = {number}",
    ))  # fmt: skip


@cache
def python_lines() -> tuple[str, ...]:
    """Return lines of the running Python's standard library. Modules that this version lacks are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    for name in PYTHON_MODULES:
        path = root / f"{name}.py"
        if path.is_file():
            lines += [line for line in path.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return tuple(lines)


def code(rng: random.Random) -> str:
    """Return a few consecutive lines of Python source."""
    lines = python_lines()
    start = rng.randrange(len(lines) - 8)
    return "\n" + "\n".join(line[:160] for line in lines[start : start + rng.randrange(2, 7)])


FILLERS: dict[str, Callable[[random.Random], str]] = {
    "prose": prose,
    "salad": salad,
    "code": code,
    "listing": listing,
}


def document(rng: random.Random, filler: Sequence[str], budget: int, count: Count, fact: str = "") -> str:
    """Return a text of at most `budget` tokens: pieces of the named fillers, with a fact at a random place."""
    left = budget - (count(f" {fact}") if fact else 0)
    pieces: list[str] = []
    misses = 0
    while misses < 4:
        piece = FILLERS[rng.choice(filler)](rng)
        size = count(piece)
        if size > left:
            misses += 1
            continue
        pieces.append(piece)
        left -= size
    if fact:
        at = rng.randrange(len(pieces) + 1)
        is_line = at < len(pieces) and pieces[at].startswith("\n")  # among lines, not sentences
        pieces.insert(at, f"\n{fact}" if is_line else f" {fact}")
    return "".join(pieces).strip()
