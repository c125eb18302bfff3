"""One question in many places: behind its document, in front of it, in another message, before rules for the answer.

A task per place, so that a table has a row for each. A number means the same document and question at every place, and
kinds of documents take turns: prose, German law, code, a log, a table, JSON. All texts are others': the standard
library's, the Unicode database, the Grundgesetz, what agents and other programs write around a question.

The same again as an order without a question mark, in a document that asks questions of its own: comments of the
standard library that end with one.
"""

from __future__ import annotations

import ast
import json
import random
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from string import Template
from typing import NamedTuple

from .. import corpus, scoring
from ..errors import NotMeasuredError
from ..facts import Turn
from .base import Item, Space, Task
from .code_qa import lines_around

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
# What other programs write around a question: Aider, Cline, Open WebUI, LangChain, Claude Code.
_EDIT_RULES = """
# *SEARCH/REPLACE block* Rules:

Every *SEARCH/REPLACE block* must use this format:
1. The *FULL* file path alone on a line, verbatim. No bold asterisks, no quotes around it, no escaping of characters.
2. The opening fence and code language, eg: ```python
3. The start of search block: <<<<<<< SEARCH
4. A contiguous chunk of lines to search for in the existing source code
5. The dividing line: =======
6. The lines to replace into the source code
7. The end of the replace block: >>>>>>> REPLACE
8. The closing fence: ```

ONLY EVER RETURN CODE IN A *SEARCH/REPLACE BLOCK*!"""
_ENVIRONMENT = """<environment_details>
# VSCode Visible Files
src/main.py

# VSCode Open Tabs
src/main.py,README.md

# Current Time
26/11/2026, 9:14:02 am (Europe/Berlin, UTC+1:00)

# Current Mode
ACT MODE
</environment_details>"""
_GUIDELINES = """### Task:
Respond to the user query using the provided context, incorporating inline citations in the format [id].

### Guidelines:
- If you don't know the answer, clearly state that.
- Respond in the same language as the user's query.
- If the context is unreadable or of poor quality, inform the user and provide the best possible answer."""
_PIECES = (
    "Use the following pieces of context to answer the question at the end. If you don't know the answer, just say that"
    " you don't know, don't try to make up an answer."
)
_REMINDER = """<system-reminder>
As you answer the user's questions, you can use the following context. IMPORTANT: this context may or may not be
relevant to your tasks. You should not respond to this context unless it is highly relevant to your task.
</system-reminder>"""
_SCHEMA = json.dumps({
    "type": "object",
    "properties": {"answer": {"type": "string", "description": "the answer"}, "confidence": {"type": "number"}},
    "required": ["answer"],
})  # fmt: skip
_RULES = "\n- ".join((
    "Rules for your answer:",
    "Keep it short.",
    "Use plain language, no headings and no lists.",
    "Say so if the text does not tell.",
))  # fmt: skip
_SIGNATURE = "Kind regards,\n\nMaria Lindqvist\nHead of Operations\nNorthern Harbour Logistics AB\nwww.example.org"
_FORMAT = "Give the answer as a single sentence, without any introduction, and add nothing that was not asked for."

# Their functions and errors; all modules would take seconds to parse.
_MODULES = (
    "argparse ast bdb calendar configparser copy csv dataclasses datetime difflib doctest enum fractions ftplib "
    "gettext gzip imaplib inspect ipaddress mailbox optparse pickle plistlib queue random shelve shlex shutil smtplib "
    "socket ssl statistics string subprocess tarfile tempfile textwrap threading turtle typing uuid wave zipfile"
).split()
_REMARK = re.compile(r"#.{25,100}\?")
_REMARKS = 6  # in a document
_DEFINITION = re.compile(r" *def (?P<name>\w{5,})\((?P<arguments>\w[^()]{3,})\):")


class Asked(NamedTuple):
    """A text's lines, the line that answers, the words of it that do, the question, and a value of the answer."""

    lines: tuple[str, ...]
    at: int
    gold: str
    question: str
    value: str


class Place(NamedTuple):
    """Where a question stands: the turns' texts with `$document`, or its halves `$first` and `$second`, and
    `$question`; the last turn's answer is the item's."""

    turns: tuple[Turn, ...]
    system: str = ""


def _alone(text: str, system: str = "") -> Place:
    return Place((Turn(text, ""),), system)


PLACES = {
    "end": _alone("$document\n\n$question"),
    "turn_after": Place((Turn("$document", "What would you like to know?"), Turn("$question", ""))),
    "front": _alone("$question\n\n$document"),
    "front_of_file": _alone('$question\n\n<document name="notes.txt">\n$document\n</document>'),
    "front_of_fence": _alone("Question: $question\n\n```\n$document\n```"),
    "front_and_rules": _alone(f"$question\n\n$document\n\n{_RULES}"),
    "both": _alone("$question\n\n$document\n\n$question"),
    "before_format": _alone(f"$document\n\n$question\n{_FORMAT}"),
    "before_rules": _alone(f"$document\n\n$question\n\n{_RULES}"),
    "before_schema": _alone(f"$document\n\n$question\n\nRespond with JSON of this schema:\n```json\n{_SCHEMA}\n```"),
    "before_signature": _alone(f"$document\n\n$question\n\n{_SIGNATURE}"),
    "before_steps": _alone("$document\n\n$question Let's think step by step, and give the answer on the last line."),
    "before_thanks": _alone("$document\n\n$question\n\nThanks in advance!"),
    "before_edit_rules": Place((Turn("Here are files:\n\n$document", "Ok."), Turn(f"$question\n{_EDIT_RULES}", ""))),
    "before_environment": _alone(
        f"<task>\n$question\n</task>\n\n<file_content>\n$document\n</file_content>\n\n{_ENVIRONMENT}"
    ),
    "after_reminder": _alone(f"$document\n\n{_REMINDER}\n$question\n\n{_REMINDER}"),
    "in_pieces": _alone(f"{_PIECES}\n\n$document\n\nQuestion: $question\nHelpful Answer:"),
    "in_a_query": _alone(
        f"{_GUIDELINES}\n\n<user_query>\n$question\n</user_query>\n\n<context>\n$document\n</context>"
    ),
    "system": _alone("$document", "You answer questions about texts. $question"),
    "system_and_rules": _alone("$document", f"$question\n\n{_RULES}"),
    "turn_before": Place((Turn("$question", "Please send me the text."), Turn("$document", ""))),
    "between": _alone("$first\n\n$question\n\n$second"),
}


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


def _make(place: Place, rng: random.Random, space: Space, order: bool = False) -> Item:
    """Return the item of the space's number at a place. The document is one of `KINDS`, by turns.

    Args:
        order: the question is an order, and the document asks.
    """
    del rng  # a number means the same document at every place
    rng = random.Random(f"places/{space.number}/{space.length}")
    turn, number = divmod(space.number, len(KINDS))
    kind = list(KINDS)[number]
    asked = KINDS[kind](rng, turn, space.length)
    remarks: list[str] = []
    if order:
        remarks = rng.sample(_remarks(), _REMARKS)
        asked = asked._replace(question=f"Answer this from the text: {asked.question.rstrip('?')}.")
    frame = [place.system, *(text for turn in place.turns for text in (turn.question, turn.answer))]
    around = (Template(text).substitute(document="", first="", second="", question=asked.question) for text in frame)
    document = lines_around(rng, asked.lines, asked.at, space.without(*around, *remarks), space)
    return _filled(place, _with_remarks(rng, document, remarks, kind), asked)


def _with_remarks(rng: random.Random, document: str, remarks: list[str], kind: str) -> str:
    lines = document.split("\n")
    for said in remarks:
        written = {"code": f"# {said}", "json": json.dumps({"remark": said}) + ","}.get(kind, said)
        lines.insert(rng.randrange(len(lines) + 1), written)
    return "\n".join(lines)


@lru_cache(maxsize=1)
def _remarks() -> list[str]:
    """Return comments of the standard library that end with a question mark."""
    lines = (line.strip() for module in corpus.modules() for line in module.source.splitlines())
    return sorted({line.lstrip("# ") for line in lines if _REMARK.fullmatch(line)})


def _filled(place: Place, document: str, asked: Asked) -> Item:
    lines = document.split("\n")
    halves = {"first": "\n".join(lines[: len(lines) // 2]), "second": "\n".join(lines[len(lines) // 2 :])}

    def fill(text: str) -> str:
        return Template(text).substitute(halves, document=document, question=asked.question)

    turns = tuple(Turn(fill(turn.question), turn.answer or asked.value) for turn in place.turns)
    return Item(turns, (asked.value,), (asked.gold.strip(),), system=fill(place.system))


PLACE_TASKS: dict[str, Task] = {
    f"place_{name}": Task(partial(_make, place), scoring.all_values, 32) for name, place in PLACES.items()
}
ORDER_TASKS: dict[str, Task] = {
    f"order_{name}": Task(partial(_make, place, order=True), scoring.all_values, 32) for name, place in PLACES.items()
}
