"""The base of all tasks: a function that makes items, and the published rule that scores an answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .. import haystack
from ..aggregates import Whole
from ..facts import Fact, Turn
from ..haystack import Count

OVERHEAD = 24  # tokens that a chat template and the line between document and question take


@dataclass(frozen=True)
class Known:
    """A word-for-word answer, which can be judged without being generated.

    Attributes:
        opening: beginning of the answer; the model is given it, and it is not measured.
        answer: rest of the answer.
        raw: the last question is a text to continue, without a chat template.
    """

    opening: str
    answer: str
    raw: bool = False


@dataclass(frozen=True)
class Item:
    """One conversation with a model.

    Attributes:
        turns: questions in order; the first one comes with the document. The last answer is the one that is scored.
        values: texts that scoring looks for.
        gold: passages of the document that the last answer needs; none where it needs the document as a whole.
        known: the last answer word for word, where there is only one.
        earlier: the conversation's turns before this one, where they are judged as well; each goes on from the last.
        mentions: words of the last answer that occur in the conversation, often more than once.
        group: items of one group are not independent: intervals resample groups. Empty: the item stands alone.
        system: a system message in front of the turns; none if empty.
    """

    turns: tuple[Turn, ...]
    values: tuple[str, ...]
    gold: tuple[str, ...] = ()
    known: Known | None = None
    earlier: tuple[Item, ...] = ()
    mentions: tuple[str, ...] = ()
    group: str = ""
    system: str = ""

    @property
    def messages_before(self) -> list[dict[str, str]]:
        """Return the system message, if there is one."""
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation up to the last question, with the right earlier answers."""
        messages = self.messages_before
        for turn in self.turns:
            messages.append({"role": turn.role, "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        return messages[:-1]


@dataclass(frozen=True)
class Space:
    """The room for a document: the limit in prompt tokens, the counter, and the needle's place if it is fixed.

    `number` is the item's, for tasks that are a list of questions.
    """

    length: int
    count: Count
    depth: float | None = None
    number: int = 0

    def without(self, *texts: str) -> int:
        """Return the tokens left beside these texts and the template."""
        return self.length - OVERHEAD - sum(self.count(text) for text in texts)


@dataclass(frozen=True)
class Task:
    """A row of the table.

    Attributes:
        make: an item from a source of randomness and the room for it.
        score: answer and values to a number in [0, 1].
        answer_tokens: longest answer.
        has_depth: whether `Space.depth` sets the place of the fact.
    """

    make: Callable[[random.Random, Space], Item]
    score: Callable[[str, Sequence[str]], float]
    answer_tokens: int = 64
    has_depth: bool = False


def make_item(task: Task, name: str, seed: int, space: Space) -> Item:
    """Return the item of that number. It is the same on every machine with the same tokenizer."""
    return task.make(random.Random(f"{name}/{seed}/{space.length}/{space.depth}"), replace(space, number=seed))


def asked_about(document: str, fact: Fact | Whole) -> Item:
    """Return the document, followed by the question."""
    gold = fact.pieces if isinstance(fact, Fact) else fact.passages
    turn = Turn(f"{document}\n\n{fact.turn.question}", fact.turn.answer)
    return Item((turn,), fact.values, gold)


def within(
    rng: random.Random,
    space: Space,
    fact: Fact,
    filler: Iterator[str],
    depths: Sequence[float] | None = None,
    others: Sequence[str] = (),
) -> Item:
    """Return a fact in filler at the given depths, with other facts at random places."""
    places = depths if depths is not None else _places(rng, space, len(fact.pieces))
    mixed = sorted([*zip(places, fact.pieces, strict=True), *((rng.random(), other) for other in others)])
    budget = space.without(fact.turn.question)
    at, pieces = [place for place, _ in mixed], [piece for _, piece in mixed]
    return asked_about(haystack.around(rng, pieces, filler, budget, space.count, at), fact)


def within_prose(
    rng: random.Random,
    space: Space,
    fact: Fact,
    depths: Sequence[float] | None = None,
    others: Sequence[str] = (),
) -> Item:
    """Return a fact in templated prose."""
    return within(rng, space, fact, iter(lambda: haystack.prose(rng), ""), depths, others)


def _places(rng: random.Random, space: Space, number: int) -> list[float]:
    if space.depth is not None and number == 1:
        return [space.depth]
    return sorted(rng.random() for _ in range(number))
