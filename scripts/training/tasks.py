"""Synthetic documents with questions about them: deterministic by seed, of any length, without downloads.

A `Sample` is one chat: an optional system message, a document, and turns of question and answer about it.
Every answer restates its fact ("The secret code for Alice is 471128."), which makes answering a matter of
finding an earlier passage and continuing it. Nothing here depends on the training framework.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_specprefill_evals import facts as shared
from mlx_specprefill_evals import words
from mlx_specprefill_evals.aggregates import AGGREGATES, occurrences
from mlx_specprefill_evals.facts import Fact, Turn, needle, six_digits
from mlx_specprefill_evals.haystack import FILLERS, Count, around, document

Message = dict[str, str]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question from the text.",
    "You are a careful assistant that reads documents and answers questions about them.",
    "Be brief.",
    "You answer questions about the given document.",
    "You are an assistant. Use only the text of the user.",
)
GREETINGS = ("Hello", "Hi", "Hello!", "Hi there", "Hey", "Good morning", "Who are you?", "What can you do?", "Test")
GREETING_ANSWER = "Hello! I am a small demonstration model. Give me a text and ask me for a fact in it."
REPEATED_FILLER = 0.3  # share of the documents whose filler repeats a few pieces
LEADS = ("", "", "", "Read the text and answer the question.\n\n", "Text:\n", "Here is a document.\n\n")
NEEDLE_QUESTIONS = (
    "What is {}'s secret code?",
    "Tell me the secret code for {}.",
    "Which secret code belongs to {}?",
    "Please give me the secret code of {}.",
    "secret code for {}?",
    "Do you know the secret code for {}?",
    "What's the secret code for {}?",
    "What is the code for {}?",
)
BRIDGES = ("\n\n", "\n\n", "\n", " ", "\n\nQuestion: ", "\n\n---\n\n")


@dataclass(frozen=True)
class Sample:
    """One chat about one document, which comes with the first question; `before` are turns without it."""

    system: str
    document: str
    turns: tuple[Turn, ...]
    lead: str = ""
    bridge: str = "\n\n"
    question_first: bool = False
    before: tuple[Turn, ...] = ()

    def messages(self) -> list[Message]:
        """Return the chat with all answers. Without the last message it is a prompt."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for number, turn in enumerate(self.before + self.turns):
            content = self._opening(turn.question) if number == len(self.before) else turn.question
            messages.append({"role": "user", "content": content})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def _opening(self, question: str) -> str:
        if not self.document:
            return question
        if self.question_first:
            return f"{question}{self.bridge}{self.document}"
        return f"{self.lead}{self.document}{self.bridge}{question}"


# --- facts -----------------------------------------------------------------------------------------------------------


def _needle(rng: random.Random) -> Fact:
    name = words.person(rng)
    fact = needle(name, six_digits(rng))
    if rng.random() < 0.8:
        return fact
    return Fact(fact.pieces, Turn(rng.choice(NEEDLE_QUESTIONS).format(name), fact.turn.answer))


def _attribute(rng: random.Random) -> Fact:
    subject = f"{rng.choice(words.ATTRIBUTES)} {words.person(rng)}"
    value = six_digits(rng) if rng.random() < 0.7 else str(rng.randrange(10, 100_000))
    sentence = f"The {subject} is {value}."
    return Fact((sentence,), Turn(f"What is the {subject}?", sentence))


def _key_value(rng: random.Random) -> Fact:
    key = f"{words.invented_word(rng)}-{words.invented_word(rng)}"
    value = six_digits(rng) if rng.random() < 0.5 else words.invented_word(rng, syllables=2)
    line = f"The value of {key} is {value}."
    return Fact((line,), Turn(f"What is the value of {key}?", line))


def _word_value(rng: random.Random) -> Fact:
    name = words.person(rng)
    kind, choices = rng.choice((("item", words.ITEMS), ("colour", words.COLOURS), ("place", words.PLACES)))
    sentence = f"The favourite {kind} of {name} is {rng.choice(choices)}."
    return Fact((sentence,), Turn(f"What is the favourite {kind} of {name}?", sentence))


def _note(rng: random.Random) -> Fact:
    text = words.fill(rng, rng.choice(words.FRAMES))
    name = words.person(rng)
    note = f"Note from {name}: {text}"
    return Fact((note,), Turn(f"What does the note from {name} say?", note))


def _variables(rng: random.Random) -> Fact:
    """Return a chain of one or two assignments. The answer follows it, so each step is one look-up."""
    first, second = (words.invented_word(rng, syllables=2).upper() for _ in range(2))
    value = str(rng.randrange(10_000, 100_000))
    pieces = (f"VAR {first} = {value}.", f"VAR {second} = VAR {first}.")
    if rng.random() < 0.5:
        return Fact(pieces[:1], Turn(f"What is the value of VAR {first}?", pieces[0]))
    return Fact(pieces, Turn(f"What is the value of VAR {second}?", f"{pieces[1]} {pieces[0]}"))


def _record(rng: random.Random) -> Fact:
    fields = {"name": words.person(rng), "city": words.invented_word(rng, syllables=2).capitalize(),
              "item": rng.choice(words.ITEMS), "salary": rng.randrange(1000, 10_000)}  # fmt: skip
    number = rng.randrange(1000, 100_000)
    record = json.dumps({"id": number} | {key: fields[key] for key in rng.sample(sorted(fields), rng.choice((2, 3)))})
    return Fact((record,), Turn(f"What is the record with id {number}?", record))


FACTS: dict[str, Callable[[random.Random], Fact]] = {
    "needle": _needle,
    "attribute": _attribute,
    "key_value": _key_value,
    "word_value": _word_value,
    "note": _note,
    "variables": _variables,
    "record": _record,
} | {f"shared.{name}": build for name, build in shared.FACTS.items()}
CROWDS = {  # what crowds the documents in which facts of a kind are looked for
    "needle": "needle",
    "shared.several_questions": "needle",
    "shared.uuid_needle": "shared.uuid_needle",
    "shared.record": "shared.record",
    "shared.three_records": "shared.record",
    "shared.order": "shared.order",
    "shared.tool": "shared.tool",
}


# --- training samples ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """The mixture of the training samples.

    Attributes:
        shares: of the kinds of facts, by their names in `FACTS`.
        turns: how many turns a chat has.
        greeting: share of the chats without a document.
        whole: share of the documents that have to be read as a whole (counts and frequencies).
        crowd: share of the documents whose filler is facts of the kind that is asked for.
        look_alikes: share of a crowd's records that have a given name or half of an id that is asked for. Training has
            so many given names that without them one tells whose record it is.
    """

    shares: dict[str, float]
    turns: tuple[int, int] = (3, 10)
    greeting: float = 0.01
    whole: float = 0.0
    crowd: float = 0.0
    look_alikes: float = 0.0


def training_sample(rng: random.Random, length: int, mixture: Mixture, count: Count) -> Sample:
    """Return one chat of about `length` tokens."""
    if rng.random() < mixture.greeting:
        return Sample(_system(rng), "", (Turn(rng.choice(GREETINGS), GREETING_ANSWER),))
    if rng.random() < mixture.whole:
        return _whole(rng, length, count)
    wanted = rng.randint(*mixture.turns)
    kinds = _draw_kinds(rng, mixture, wanted)
    facts = _fitting([FACTS[kind](rng) for kind in kinds], length, count)
    crowds = [CROWDS[kind] for kind in kinds[: len(facts)] if kind in CROWDS]
    frame = Sample(
        system=_system(rng),
        document="x",
        turns=_asked(rng, facts),
        lead=rng.choice(LEADS),
        bridge=rng.choice(BRIDGES),
        question_first=rng.random() < 0.12,
        before=(Turn(rng.choice(GREETINGS), GREETING_ANSWER),) if rng.random() < 0.03 else (),
    )
    overhead = sum(count(message["content"]) + 5 for message in frame.messages())
    rng.shuffle(facts)
    crowd = rng.choice(crowds) if crowds and rng.random() < mixture.crowd else ""
    return replace(frame, document=_document(rng, facts, length - overhead - 4, crowd, mixture.look_alikes, count))


def _document(
    rng: random.Random, facts: Sequence[Fact], budget: int, crowd: str, look_alikes: float, count: Count
) -> str:
    pieces = [piece for fact in facts for piece in fact.pieces]
    if crowd:
        build = FACTS[crowd]
        asked = _full_records(pieces) if look_alikes and crowd == "shared.record" else []
        others = iter(lambda: "\n" + _look_alike(rng, build(rng).pieces[0], asked, look_alikes), "")
        return around(rng, pieces, others, budget, count)
    kinds = rng.sample(sorted(FILLERS), rng.choice((1, 1, 2, 3)))
    variety = rng.choice((1, 2, 4, 8, 16)) if rng.random() < REPEATED_FILLER else 0
    return document(rng, pieces, kinds, budget, count, variety=variety)


def _full_records(pieces: Sequence[str]) -> list[dict[str, Any]]:
    return [json.loads(piece) for piece in pieces if piece.startswith('{"id"') and '"email"' in piece]


def _look_alike(rng: random.Random, record: str, asked: Sequence[dict[str, Any]], share: float) -> str:
    """Return the record unchanged, or with the given name or half of the id of one in question, never all of either."""
    if not asked or rng.random() >= share:
        return record
    fields, like = json.loads(record), rng.choice(asked)
    given, own, other = like["name"].split()[0], str(fields["id"]), str(like["id"])
    if given in words.GIVEN_NAMES and rng.random() < 0.7:
        name = given if rng.random() < 0.5 else f"{given} {words.invented_word(rng, syllables=2).capitalize()}"
        fields |= {"name": name, "email": shared.email(name, fields["city"])}
    else:
        fields["id"] = int(other[:3] + own[3:] if rng.random() < 0.5 else own[:3] + other[3:])
    known = any(fields[key] == one[key] for one in asked for key in ("id", "name"))
    return record if known else json.dumps(fields)


def _whole(rng: random.Random, length: int, count: Count) -> Sample:
    kind, room = rng.choice((*AGGREGATES, "occurrences")), length - 72
    if kind == "occurrences":  # half of the short documents count as far as long ones
        most = rng.choice((0, max(4, min(12, room // 20))))
        # One kind of filler is learnt by heart: then whatever else the text holds is counted as well.
        whole = occurrences(rng, room, count, most=most, filler=rng.sample(sorted(FILLERS), rng.choice((1, 2, 3))))
    else:
        whole = AGGREGATES[kind](rng, room, count, False)
    return Sample("", whole.document, (whole.turn,))


def _draw_kinds(rng: random.Random, mixture: Mixture, number: int) -> list[str]:
    names, weights = list(mixture.shares), list(mixture.shares.values())
    # Half of the chats hold one kind of fact, so that the questions differ in the name only.
    return rng.choices(names, weights) * number if rng.random() < 0.5 else rng.choices(names, weights, k=number)


def _fitting(facts: Sequence[Fact], length: int, count: Count) -> list[Fact]:
    """Return the first facts that fit with their questions and answers, at least one."""
    left, fitting = length - 40, list[Fact]()
    for fact in facts:
        left -= sum(count(text) + 5 for text in (*fact.pieces, fact.turn.question, fact.turn.answer))
        if fitting and left < 0:
            break
        fitting.append(fact)
    return fitting


def _asked(rng: random.Random, facts: Sequence[Fact]) -> tuple[Turn, ...]:
    """Return the turns in random order. In some chats the document holds more facts than the turns ask for."""
    turns = [fact.turn for fact in facts]
    rng.shuffle(turns)
    return tuple(turns[: rng.randint(1, len(turns))] if rng.random() < 0.3 else turns)


def _system(rng: random.Random) -> str:
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else ""
