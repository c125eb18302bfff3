"""Facts in documents and the questions for them: one wording for the demo pairs and real models.

Every answer restates what the document says ("The secret code for Alice is 471128."), in the order in which it is
found: a small model answers by finding a passage and continuing it, a large one has no reason to say it differently.
Scoring looks only for `values`, so other wordings of a right answer count as well.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from . import words

ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
TRANSLATIONS = {
    "Chinese": "{name} 的密码是 {value}。",
    "Spanish": "El código secreto de {name} es {value}.",
    "Russian": "Секретный код для {name}: {value}.",
    "Arabic": "الرمز السري لـ {name} هو {value}.",
}
RECORD_FIELDS = ("salary", "name", "city")  # what can be asked for
# Two tokens each in the bundled tokenizer: one alone is matched by salaries and dates too.
RECORD_IDS = range(100_000, 1_000_000)
DEPARTMENTS = "sales research finance legal support marketing production security".split()


@dataclass(frozen=True)
class Turn:
    """A question, and the answer that restates the fact.

    Attributes:
        role: of the question's message: "user", or "tool" for the result of a call.
    """

    question: str
    answer: str
    role: Literal["user", "tool"] = "user"


@dataclass(frozen=True)
class Fact:
    """The pieces of a fact in document order, the turn that asks for them, and the values of a right answer."""

    pieces: tuple[str, ...]
    turn: Turn
    values: tuple[str, ...] = ()


def six_digits(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def uuid(rng: random.Random) -> str:
    """Return a version 4 UUID from the given source of randomness."""
    raw = f"{rng.getrandbits(128):032x}"
    return f"{raw[:8]}-{raw[8:12]}-4{raw[13:16]}-{'89ab'[rng.randrange(4)]}{raw[17:20]}-{raw[20:]}"


def needle(name: str, value: str) -> Fact:
    """Return the fact of the acceptance test."""
    sentence = f"The secret code for {name} is {value}."
    return Fact((sentence,), Turn(f"What is the secret code for {name}?", sentence), (value,))


def number_needle(rng: random.Random) -> Fact:
    return needle(words.person(rng), six_digits(rng))


def uuid_needle(rng: random.Random) -> Fact:
    name, value = words.person(rng), uuid(rng)
    sentence = f"The vault access code for {name} is {value}."
    return Fact((sentence,), Turn(f"What is the vault access code for {name}?", sentence), (value,))


def _record(rng: random.Random, number: int) -> dict[str, str | int]:
    person = words.person(rng)
    city = words.invented_word(rng, syllables=2).capitalize()
    return {
        "id": number,
        "salary": rng.randrange(1000, 10_000),
        "name": person,
        "city": city,
        "dept": rng.choice(DEPARTMENTS),
        "start_date": (date(2000, 1, 1) + timedelta(days=rng.randrange(9000))).isoformat(),
        "email": f"{person.lower().replace(' ', '.')}@{city.lower()}.org",
    }


def _read_out(fields: dict[str, str | int]) -> str:
    """Return the text of a record from its number to the last field that a question can ask for."""
    text = json.dumps({name: fields[name] for name in ("id", *RECORD_FIELDS)})
    return text.removeprefix('{"id": ').removesuffix("}")


def record(rng: random.Random, number: int) -> Fact:
    """Return one JSON record and a question about one of its fields."""
    fields = _record(rng, number)
    asked = rng.choice(RECORD_FIELDS)
    turn = Turn(f"What is the {asked} in the record with id {fields['id']}?", f"Id {_read_out(fields)}.")
    return Fact((json.dumps(fields),), turn, (str(fields[asked]),))


def three_records(rng: random.Random, numbers: Sequence[int]) -> Fact:
    """Return a question for fields of three records.

    The answer names the three numbers before it reads the records out: what an answer begins with is what a draft
    looks ahead at.
    """
    records = [_record(rng, number) for number in numbers]
    asked = rng.choices(RECORD_FIELDS, k=3)
    listed = "{}, {} and {}".format(*numbers)
    each = list(zip(ORDINALS, records, asked, strict=False))
    wanted = "; ".join(f"{nth} {fields['id']}, its {field}" for nth, fields, field in each)
    found = "; ".join(f"{nth} {_read_out(fields)}" for nth, fields, _ in each)
    turn = Turn(f"Look up the ids {listed}: {wanted}.", f"For {listed}: {found}.")
    return Fact(tuple(map(json.dumps, records)), turn, tuple(str(fields[field]) for _, fields, field in each))


def order(rng: random.Random) -> Fact:
    """Return one XML order of 2-3 items. The answer reads it out up to the item in question."""
    number, customer = rng.randrange(1000, 100_000), words.person(rng)
    items = [(sku, rng.randrange(1, 100)) for sku in rng.sample(range(100, 1000), rng.choice((2, 3)))]
    lines = [f'<order id="{number}"><customer name="{customer}"/>']
    lines += [f'<item sku="{sku}" qty="{quantity}"/>' for sku, quantity in items]
    asked = rng.randrange(len(items))
    sku, quantity = items[asked]
    question = f"What is the qty of the item with sku {sku} in the order with id {number}?"
    answer = Turn(question, "".join(lines[: asked + 2]))
    return Fact(("".join(lines) + "</order>",), answer, (str(quantity),))


def rule_and_exception(rng: random.Random) -> Fact:
    """Return a rule early in the document and an exception later. The answer needs both."""
    name, code, word = words.person(rng), six_digits(rng), rng.choice(words.COLOURS)
    pieces = (
        f"Rule for {name}: answer with the code {code}.",
        f"Exception for {name}: add the word {word}.",
    )
    question = f"What must be answered for {name}, by the rule and the exception?"
    return Fact(pieces, Turn(question, " ".join(pieces)), (code, word))


def foreign_needle(rng: random.Random) -> Fact:
    """Return a fact in another language than the text and the question."""
    name, value = words.person(rng), six_digits(rng)
    sentence = rng.choice(tuple(TRANSLATIONS.values())).format(name=name, value=value)
    return Fact((sentence,), Turn(f"What is the secret code for {name}?", sentence), (value,))


def tagged_list(rng: random.Random, number: int = 12) -> Fact:
    """Return facts with a common tag and a question for all of them."""
    tag = words.invented_word(rng, syllables=2)
    things = rng.sample(words.ITEMS, number)
    pieces = tuple(f"Entry {i} of {tag}: the {thing}." for i, thing in enumerate(things, 1))
    return Fact(pieces, Turn(f"List all entries of {tag}.", " ".join(pieces)), tuple(things))


def latest_value(rng: random.Random, updates: int = 0) -> Fact:
    """Return a value that is updated 1-20 times. The last one counts."""
    name = words.person(rng)
    values = rng.sample(range(100, 1000), (updates or rng.randint(1, 20)) + 1)
    pieces = tuple(f"The balance of {name} is now {value}." for value in values)
    return Fact(pieces, Turn(f"What is the latest balance of {name}?", pieces[-1]), (str(values[-1]),))


def tool(rng: random.Random) -> Fact:
    """Return one tool's definition. The question describes the tool in the definition's words."""
    thing, place = rng.choice(words.ITEMS), rng.choice(words.PLACES)
    verb = words.invented_word(rng, syllables=2)
    name = f"{verb}_{words.invented_word(rng, syllables=2)}"
    text = json.dumps({"description": f"{verb} the {thing} of the {place}", "name": name})
    return Fact((text,), Turn(f"Which tool can {verb} the {thing} of the {place}?", text), (name,))
