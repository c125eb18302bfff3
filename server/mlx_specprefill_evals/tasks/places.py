"""One question in many places: behind its document, in front of it, in another message, before rules for the answer.

A task per place, so that a table has a row for each. A number means the same document and question at every place, and
kinds of documents take turns.

The same again as an order without a question mark, in a document that asks questions of its own: comments of the
standard library that end with one.
"""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache, partial
from string import Template

from .. import corpus
from ..facts import Turn
from .around_questions import PLACES, Place
from .asked_documents import KINDS, Asked
from .base import Item, Space, Task
from .code_qa import lines_around

_REMARK = re.compile(r"#.{25,100}\?")
_REMARKS = 6  # in a document


def tasks_at_places(prefix: str, order: bool = False) -> dict[str, Task]:
    """Return a task for each place, by its name behind the prefix. `order` is as in `_make`."""
    return {f"{prefix}_{name}": Task(partial(_make, place, order=order), 32) for name, place in PLACES.items()}


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
