"""Eight adversarial tests of a selection: exact strings, records that look alike, code, rules with exceptions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from functools import partial
from itertools import islice

from .. import facts, haystack, scoring, words
from ..facts import Fact, Turn
from .base import Item, Space, Task, asked_about, within_prose

RECORDS, ORDERS, FUNCTIONS = 80, 60, 400  # of the published tests; shorter documents hold as many as fit
RULE_AT, EXCEPTION_AT = 0.05, 0.6

# (kind, right code, wrong code, the wrong line): "{}" is the function's own word.
CODE = (
    (
        "last_{}",
        '(rows):\n    """Return the last row."""\n    return rows[len(rows) - 1]',
        '(rows):\n    """Return the last row."""\n    return rows[len(rows)]',
    ),
    (
        "add_{}",
        '(one, other):\n    """Return the sum."""\n    return one + other',
        '(one, other):\n    """Return the sum."""\n    return one - other',
    ),
    (
        "share_{}",
        '(total, parts):\n    """Return the total divided by the parts."""\n    return divide(total, parts)',
        '(total, parts):\n    """Return the total divided by the parts."""\n    return divide(parts, total)',
    ),
    (
        "fetch_{}",
        '(client):\n    """Return the body of the reply."""\n    reply = await client.get("/")\n    return reply.body',
        '(client):\n    """Return the body of the reply."""\n    reply = client.get("/")\n    return reply.body',
    ),
    (
        "collect_{}",
        '(item, seen=None):\n    """Return all items of this call."""\n    return [*(seen or []), item]',
        '(item, seen=[]):\n    """Return all items of this call."""\n    seen.append(item)\n    return seen',
    ),
)


def _vault_code(depth: float, rng: random.Random, space: Space) -> Item:
    return within_prose(rng, space, facts.uuid_needle(rng), [depth])


def _json(rng: random.Random, space: Space) -> Item:
    numbers = rng.sample(facts.RECORD_IDS, RECORDS)
    asked = facts.three_records(rng, numbers[:3])
    names = {json.loads(piece)["name"] for piece in asked.pieces}
    others = (_namesake_free(rng, number, names) for number in numbers[3:])
    return _collection(rng, space, asked, others, ("[", ",\n", "]"))


def _namesake_free(rng: random.Random, number: int, names: set[str]) -> str:
    """Return a record of somebody outside `names`, and add the name. The text after a name reveals its record."""
    while True:
        piece = facts.record(rng, number).pieces[0]
        name = json.loads(piece)["name"]
        if name not in names:
            names.add(name)
            return piece


def _xml(rng: random.Random, space: Space) -> Item:
    others = (facts.order(rng).pieces[0] for _ in range(ORDERS - 1))
    return _collection(rng, space, facts.order(rng), others, ("<orders>\n", "\n", "\n</orders>"))


def _collection(
    rng: random.Random, space: Space, fact: Fact, others: Iterable[str], marks: tuple[str, str, str]
) -> Item:
    """Return an item with the fact among as many others of its kind as fit, then prose."""
    opening, between, closing = marks
    left = space.without(fact.turn.question, *(piece + between for piece in fact.pieces)) - 8
    pieces: list[str] = []
    for piece in others:
        size = space.count(piece + between)
        if size > left:
            break
        pieces.append(piece)
        left -= size
    everything = [*pieces, *fact.pieces]
    rng.shuffle(everything)
    block = opening + between.join(everything) + closing
    tail = haystack.document(rng, (), ["prose"], left, space.count)
    return asked_about(f"{block}\n\n{tail}" if tail else block, fact)


def _code_bug(rng: random.Random, space: Space) -> Item:
    """Return a module in which one function contradicts its docstring."""
    kind, _, wrong = rng.choice(CODE)
    name = kind.format(words.invented_word(rng, syllables=2))
    bug = _function(name, wrong)
    line = next(line for line in wrong.split("\n")[::-1] if line not in _right_lines(kind)).strip()
    turn = Turn(
        "One function of this module does not do what its docstring says. Which function, and in which line?",
        f"The bug is in {name}, in the line: {line}",
    )
    left = space.without(turn.question, bug)
    functions: list[str] = []
    for function in islice(iter(lambda: _right_function(rng), ""), FUNCTIONS - 1):
        size = space.count(function + "\n\n\n")
        if size > left:
            break
        functions.append(function)
        left -= size
    functions.insert(rng.randrange(len(functions) + 1), bug)
    return asked_about("\n\n\n".join(functions), Fact((bug,), turn, (name,)))


def _right_lines(kind: str) -> list[str]:
    return next(right for name, right, _ in CODE if name == kind).split("\n")


def _right_function(rng: random.Random) -> str:
    kind, right, _ = rng.choice(CODE)
    return _function(kind.format(words.invented_word(rng, syllables=2)), right)


def _function(name: str, rest: str) -> str:
    return f"{'async ' if name.startswith('fetch') else ''}def {name}{rest}"


def _back_reference(rng: random.Random, space: Space) -> Item:
    fact = facts.rule_and_exception(rng)
    others = [piece for _ in range(2) for piece in facts.rule_and_exception(rng).pieces]
    return within_prose(rng, space, fact, [RULE_AT, EXCEPTION_AT], others)


def _mixed_language(rng: random.Random, space: Space) -> Item:
    return within_prose(rng, space, facts.foreign_needle(rng))


ADVERSARIAL: dict[str, Task] = {
    "needle_uuid_10": Task(partial(_vault_code, 0.1), scoring.all_values),
    "needle_uuid_50": Task(partial(_vault_code, 0.5), scoring.all_values),
    "needle_uuid_90": Task(partial(_vault_code, 0.9), scoring.all_values),
    "json": Task(_json, scoring.all_values, 256),
    "code_bug": Task(_code_bug, scoring.all_values),
    "back_reference": Task(_back_reference, scoring.every_value),
    "mixed_language": Task(_mixed_language, scoring.all_values, has_depth=True),
    "xml": Task(_xml, scoring.last_number, 128),
}
