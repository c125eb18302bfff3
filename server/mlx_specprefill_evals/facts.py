"""Facts in documents and the questions for them: one wording for the demo pairs and real models.

Every answer restates what the document says ("The secret code for Alice is 471128."): a small model answers by finding
a passage and continuing it, a large one has no reason to say it differently. Scoring looks only for the value, so other
wordings of a right answer count as well.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Literal

from . import words


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
    """A passage of a document, the turn that asks for it, and the value of a right answer."""

    text: str
    turn: Turn
    value: str


def six_digits(rng: random.Random) -> str:
    return str(rng.randrange(100_000, 1_000_000))


def number_needle(rng: random.Random) -> Fact:
    """Return the fact of the acceptance test: somebody's code."""
    name, value = words.person(rng), six_digits(rng)
    sentence = f"The secret code for {name} is {value}."
    return Fact(sentence, Turn(f"What is the secret code for {name}?", sentence), value)


def tool(rng: random.Random) -> Fact:
    """Return one tool's definition. The question describes the tool in the definition's words."""
    thing, place = rng.choice(words.ITEMS), rng.choice(words.PLACES)
    verb = words.invented_word(rng, syllables=2)
    name = f"{verb}_{words.invented_word(rng, syllables=2)}"
    text = json.dumps({"description": f"{verb} the {thing} of the {place}", "name": name})
    return Fact(text, Turn(f"Which tool can {verb} the {thing} of the {place}?", text), name)
