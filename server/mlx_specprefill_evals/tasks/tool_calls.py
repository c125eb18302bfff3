"""A tool's arguments, copied from another tool's result."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from .. import corpus, scoring
from .base import Item, Space, Task
from .real import JOINED, answered

ASK = "Call read_file to open the definition of {}."
SEARCHED = "The tool search found these lines:\n"
GROUP = 6  # lines of one file at most


@dataclass(frozen=True)
class _Found:
    """A function's definition in the standard library, in the form of a search result."""

    name: str
    path: str
    number: int
    text: str

    @property
    def line(self) -> str:
        return f"{self.path}:{self.number}: {self.text}"

    @property
    def short(self) -> str:
        """Return the line in the form used below its file's name."""
        return f"{self.number}: {self.text}"


@lru_cache(maxsize=1)
def _found() -> tuple[_Found, ...]:
    """Return the functions whose names are defined once, by file and place."""
    found = [
        _Found(node.name, f"{module.name.replace('.', '/')}.py", node.lineno, lines[node.lineno - 1].strip()[:120])
        for module in corpus.modules()
        for lines in [module.source.splitlines()]
        for node in ast.walk(corpus.tree_of(module))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    names = Counter(one.name for one in found)
    single = (one for one in found if names[one.name] == 1 and f"def {one.name}(" in one.text)
    return tuple(sorted(single, key=lambda one: (one.path, one.number)))


@lru_cache(maxsize=1)
def _files() -> tuple[tuple[_Found, ...], ...]:
    """Return the files with several of these functions."""
    files = (tuple(found) for _, found in groupby(_found(), lambda one: one.path))
    return tuple(found for found in files if len(found) > 1)


def _tool_call(rng: random.Random, space: Space) -> Item:
    """Return a question for one definition among many search results: its path and line as a call's arguments."""
    asked = rng.choice(_found())
    others = [[one.line] for one in rng.sample(_found(), len(_found())) if asked.name not in one.line]
    return _item(rng, space, asked, [asked.line], [asked.line], others)


def _tool_call_grouped(rng: random.Random, space: Space) -> Item:
    """Return the same question where lines stand below the name of their file."""
    files = rng.sample(_files(), len(_files()))
    shown = [[found[0].path, *(one.short for one in found[:GROUP])] for found in files]
    asked = rng.choice(files[0][1:GROUP])
    others = [lines for lines in shown[1:] if not any(asked.name in line for line in lines)]
    return _item(rng, space, asked, shown[0], [asked.path, asked.short], others)


def _item(
    rng: random.Random, space: Space, asked: _Found, own: list[str], gold: list[str], others: list[list[str]]
) -> Item:
    """Return an item with as many groups of lines as fit, in a random order."""
    call = json.dumps({"name": "read_file", "arguments": {"path": asked.path, "line": asked.number}})
    opening, question = call[: call.index(asked.path)], ASK.format(asked.name)
    left, pieces = int(JOINED * space.without(SEARCHED, *own, question, call)), []
    for lines in others:
        left -= space.count("\n".join(lines) + "\n")
        if left < 0:
            break
        pieces.append("\n".join(lines))
    pieces.insert(rng.randrange(max(1, len(pieces))), "\n".join(own))
    document = SEARCHED + "\n".join(pieces)
    return answered(f"{document}\n\n{question}", opening, call[len(opening) :], gold)


CALLS: dict[str, Task] = {
    "tool_call": Task(_tool_call, scoring.all_values, 48),
    "tool_call_grouped": Task(_tool_call_grouped, scoring.all_values, 48),
}
