"""Filler text of several kinds, and documents of any length around the facts.

Training and evaluation share it; `held_out` draws from the part that training never sees.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path

from . import words

Count = Callable[[str], int]

PYTHON_MODULES = (
    "argparse ast bdb calendar cmd codecs collections/__init__ configparser contextlib copy csv datetime dataclasses "
    "difflib dis doctest enum fileinput fnmatch fractions ftplib functools getopt gettext glob gzip hashlib heapq hmac "
    "html/parser imaplib inspect ipaddress json/decoder json/encoder locale logging/__init__ lzma mailbox mimetypes "
    "ntpath numbers operator optparse os pathlib pdb pickle pickletools platform plistlib poplib posixpath pprint "
    "profile pstats queue quopri random reprlib sched selectors shelve shlex shutil site smtplib socket socketserver "
    "ssl statistics string stringprep subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading "
    "timeit token tokenize trace traceback types typing urllib/parse urllib/request uuid warnings wave weakref zipfile"
).split()
# The noise of the published retrieval tasks: the same five sentences over and over.
NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

HELD_OUT_MODULES = "bisect base64 chunk colorsys compileall filecmp linecache netrc nntplib sre_parse turtle".split()


def prose(rng: random.Random, held_out: bool = False) -> str:
    """Return one sentence of templated prose, with a leading space."""
    frames = words.HELD_OUT_FRAMES if held_out else words.FRAMES
    return " " + words.fill(rng, rng.choice(frames), held_out)


def salad(rng: random.Random, held_out: bool = False) -> str:
    """Return one sentence of invented words."""
    return " " + " ".join(words.invented_word(rng, held_out) for _ in range(rng.randrange(4, 14))).capitalize() + "."


def listing(rng: random.Random, held_out: bool = False) -> str:
    """Return a line of a log or list."""
    word, other = (words.invented_word(rng, held_out) for _ in range(2))
    number = rng.randrange(10 ** rng.randrange(1, 6))
    return rng.choice((
        f"\n{rng.randrange(10, 24)}:{rng.randrange(10, 60)} {word} {other} {number}",
        f"\n- {word}: {number}",
        f"\n{rng.randrange(1, 300)}. {word} {other}",
        f"\n[{word}] {other} = {number}",
    ))  # fmt: skip


@lru_cache(maxsize=2)
def python_lines(held_out: bool = False) -> tuple[str, ...]:
    """Return lines of the running Python's standard library. Modules that this version lacks are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines: list[str] = []
    for name in HELD_OUT_MODULES if held_out else PYTHON_MODULES:
        path = root / f"{name}.py"
        if path.is_file():
            lines += [line for line in path.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return tuple(lines)


def code(rng: random.Random, held_out: bool = False) -> str:
    """Return a few consecutive lines of Python source."""
    lines = python_lines(held_out)
    start = rng.randrange(len(lines) - 8)
    return "\n" + "\n".join(line[:160] for line in lines[start : start + rng.randrange(2, 7)])


FILLERS: dict[str, Callable[[random.Random, bool], str]] = {
    "prose": prose,
    "salad": salad,
    "code": code,
    "listing": listing,
}


def document(
    rng: random.Random,
    facts: Sequence[str],
    filler: Sequence[str],
    budget: int,
    count: Count,
    *,
    depths: Sequence[float] | None = None,
    held_out: bool = False,
    variety: int = 0,
) -> str:
    """Return a text of at most `budget` tokens: pieces of the named fillers with `facts` among them.

    `depths` gives the place of each fact as a share of the text; without it the places are random. `facts` keep
    their order. With a `variety` the filler repeats that many pieces over and over, in order: the haystack that
    people type by hand, and a trap for a model that copies what followed last time.
    """
    pool = [FILLERS[rng.choice(filler)](rng, held_out) for _ in range(variety)]
    more = cycle(pool) if variety else iter(lambda: FILLERS[rng.choice(filler)](rng, held_out), None)
    return around(rng, facts, more, budget, count, depths)


def around(
    rng: random.Random,
    facts: Sequence[str],
    filler: Iterator[str],
    budget: int,
    count: Count,
    depths: Sequence[float] | None = None,
) -> str:
    """Return a `document` with filler from an endless iterator. Each piece has its own leading space or line break."""
    left = budget - sum(count(" " + fact) for fact in facts)
    pieces: list[str] = []
    sizes: list[int] = []
    misses = 0
    while misses < 4:
        piece = next(filler)
        size = count(piece)
        if size > left:
            misses += 1
            continue
        pieces.append(piece)
        sizes.append(size)
        left -= size
    places = list(depths) if depths is not None else sorted(rng.random() for _ in facts)
    return _insert(pieces, sizes, facts, places).strip()


def _insert(pieces: list[str], sizes: list[int], facts: Sequence[str], places: Sequence[float]) -> str:
    total, seen, out, waiting = sum(sizes), 0, [], list(zip(places, facts, strict=True))
    for piece, size in zip(pieces, sizes, strict=True):
        while waiting and seen >= waiting[0][0] * total:
            out.append(_join(piece, waiting.pop(0)[1]))
        out.append(piece)
        seen += size
    return "".join(out) + "".join(" " + fact for _, fact in waiting)


def _join(following: str, fact: str) -> str:
    """Return the fact with a line break among lines, with a space among sentences."""
    return f"\n{fact}" if following.startswith("\n") else f" {fact}"
