"""Documents of six kinds, each with a question that one of its lines answers: prose, German law, code, a log, a table,
JSON. All texts are others': the standard library's, the Unicode database, the Grundgesetz.
"""

from __future__ import annotations

import ast
import json
import random
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .. import corpus
from ..errors import NotMeasuredError

# A sentence to find, the question that it answers, and the answer.
_ENGLISH = """\
All identifiers are converted into the normal form|Into which normal form are identifiers converted?|NFKC
the debugger will pause execution just before|Before which line of a module will the debugger pause execution?|first
Zero and negative values of *n* clear the sequence.|What do zero and negative values of n do to a sequence?|clear
The unary "~" (invert) operator yields|What does the unary invert operator yield?|bitwise inversion
are used to create anonymous functions|What are lambda expressions used to create?|anonymous functions
Private names are transformed to a longer form|To what are private names transformed?|longer form
Some objects contain references to “external” resources|Which external resources do some objects refer to?|open files"""
_GERMAN = """\
Das Amt des Bundespräsidenten dauert|Wie lange dauert das Amt des Bundespräsidenten?|fünf Jahre
Die Bundesflagge ist|Welche Farben hat die Bundesflagge?|schwarz-rot-gold
Die Hauptstadt der Bundesrepublik Deutschland ist|Welche Stadt ist die Hauptstadt der Bundesrepublik?|Berlin
Wahlberechtigt ist, wer|Welches Lebensjahr muß vollendet haben, wer wahlberechtigt ist?|achtzehnte
Der Bundestag tritt spätestens|Wann nach der Wahl tritt der Bundestag spätestens zusammen?|dreißigsten Tag
Der Bundesrat wählt seinen Präsidenten|Für wie lange wählt der Bundesrat seinen Präsidenten?|ein Jahr
bestimmt die Richtlinien der Politik|Wer bestimmt die Richtlinien der Politik?|Bundeskanzler
Begnadigungsrecht|In welchen Fällen übt er das Begnadigungsrecht aus?|Einzelfalle"""
# Their functions and errors; all modules would take seconds to parse.
_MODULES = (
    "argparse ast bdb calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib "
    "gettext gzip imaplib inspect ipaddress mailbox optparse pickle plistlib queue random shelve shlex shutil smtplib "
    "socket ssl statistics string subprocess tarfile tempfile textwrap threading turtle typing uuid wave zipfile"
).split()
_DEFINITION = re.compile(r" *def (?P<name>\w{5,})\((?P<arguments>\w[^()]{3,})\):")


class Asked(NamedTuple):
    """A text's lines, the line that answers, the words of it that do, the question, and a value of the answer."""

    lines: tuple[str, ...]
    at: int
    gold: str
    question: str
    value: str


def _prose(rng: random.Random, number: int, length: int) -> Asked:
    return _known(_sentences(), _ENGLISH, number)


@lru_cache(maxsize=1)
def _sentences() -> tuple[str, ...]:
    return tuple(sentence for paragraph in corpus.paragraphs() for sentence in corpus.sentences(paragraph))


def _german(rng: random.Random, number: int, length: int) -> Asked:
    """Ask about articles 20 to 69 of the German constitution, an official work without copyright."""
    law = Path(__file__).with_name("grundgesetz.txt").read_text(encoding="utf-8")
    return _known(tuple(law.splitlines()), _GERMAN, number)


def _known(text: tuple[str, ...], rows: str, number: int) -> Asked:
    """Return a text with its question of that number.

    Raises:
        NotMeasuredError: the text differs, as between versions of Python.
    """
    listed = rows.splitlines()
    said, question, value = listed[number % len(listed)].split("|")
    places = [place for place, line in enumerate(text) if said in line]
    if len(places) != 1:
        raise NotMeasuredError(f"the text says {said!r} in {len(places)} places")
    sentences = re.split(r"(?<=[.;]) (?=[A-Zw])", text[places[0]])
    return Asked(text, places[0], next(part for part in sentences if said in part), question, value)


def _code(rng: random.Random, number: int, length: int) -> Asked:
    """Ask for the arguments of a function in its own words: `code_qa` asks for one in other words."""
    modules = [module for module in corpus.modules() if module.name in _MODULES]
    while True:
        lines = tuple(rng.choice(modules).source.splitlines())
        at = rng.randrange(len(lines))
        found = _DEFINITION.fullmatch(lines[at])
        if found is not None and sum(found["name"] in line for line in lines) == 1:
            question = f"Which arguments does {found['name']} take?"
            return Asked(lines, at, lines[at], question, found["arguments"])


def _log(rng: random.Random, number: int, length: int) -> Asked:
    """Return a log of the standard library's own complaints, which are asked for by their words."""
    said = rng.sample(_sources().complaints, min(len(_sources().complaints), length // 8))
    times = sorted(rng.sample(range(86400), len(said)))
    clock = [f"{at // 3600:02d}:{at // 60 % 60:02d}:{at % 60:02d}" for at in times]
    lines = tuple(f"2026-03-14 {at} ERROR {words}" for at, words in zip(clock, said, strict=True))
    at = rng.randrange(len(lines))
    return Asked(lines, at, lines[at], f'When was the error "{said[at].split(": ", 1)[1]}" logged?', clock[at])


def _table(rng: random.Random, number: int, length: int) -> Asked:
    """Return rows of the Unicode database, and ask for the code of a character."""
    named = ((code, unicodedata.name(chr(code), "")) for code in range(0x2000, 0x2FFF))
    symbols = [(f"U+{code:04X}", name, unicodedata.category(chr(code))) for code, name in named if 0 < len(name) < 40]
    rows = rng.sample(symbols, min(len(symbols), length // 4))
    at = rng.randrange(len(rows))
    lines = ("code,name,category", *(",".join(row) for row in rows))
    return Asked(lines, at + 1, lines[at + 1], f"What is the code of {rows[at][1]}?", rows[at][0])


def _json(rng: random.Random, number: int, length: int) -> Asked:
    """Return records of the standard library's functions, and ask for the line of one."""
    functions = rng.sample(_sources().functions, min(len(_sources().functions), length // 16))
    lines = tuple(json.dumps(function) + "," for function in functions)
    at = rng.randrange(len(lines))
    asked = functions[at]
    question = f"In which line of {asked['module']} does the function {asked['function']} begin?"
    return Asked(lines, at, lines[at], question, str(asked["line"]))


class _Sources(NamedTuple):
    """Errors with a fixed text, each text once, and public functions, each name once."""

    complaints: list[str]
    functions: list[dict[str, object]]


@lru_cache(maxsize=1)
def _sources() -> _Sources:
    complaints: dict[str, str] = {}
    functions: dict[str, dict[str, object]] = {}
    for module in corpus.modules():
        for node in ast.walk(corpus.tree_of(module)) if module.name in _MODULES else ():
            match node:
                case ast.Raise(exc=ast.Call(func=kind, args=[ast.Constant(value=str(words))])):
                    if 20 < len(words) < 80 and "\n" not in words:
                        complaints.setdefault(words, f"{module.name} {ast.unparse(kind)}: {words}")
                case ast.FunctionDef() if not node.name.startswith("_"):
                    functions.setdefault(node.name, _described(module.name, node))
    return _Sources(
        [complaints[words] for words in sorted(complaints)], [functions[name] for name in sorted(functions)]
    )


def _described(module: str, node: ast.FunctionDef) -> dict[str, object]:
    described = (ast.get_docstring(node) or "").split("\n")[0]
    arguments = [argument.arg for argument in node.args.args]
    record = {"module": module, "function": node.name, "line": node.lineno, "arguments": arguments}
    return record | {"description": described}


KINDS: dict[str, Callable[[random.Random, int, int], Asked]] = {
    "prose": _prose,
    "german": _german,
    "code": _code,
    "log": _log,
    "table": _table,
    "json": _json,
}
