"""The base of all tasks: a function that makes items, and the longest answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

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
        values: texts that are looked for in an answer.
        gold: passages of the document that the last answer needs; none where it needs the document as a whole.
        known: the last answer word for word, where there is only one.
        mentions: words of the last answer that occur in the conversation, often more than once.
        group: items of one group are not independent: intervals resample groups. Empty: the item stands alone.
        system: a system message in front of the turns; none if empty.
    """

    turns: tuple[Turn, ...]
    values: tuple[str, ...]
    gold: tuple[str, ...] = ()
    known: Known | None = None
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
    """The room for a document: the limit in prompt tokens, and the counter.

    `number` is the item's, for tasks that are a list of questions.
    """

    length: int
    count: Count
    number: int = 0

    def without(self, *texts: str) -> int:
        """Return the tokens left beside these texts and the template."""
        return self.length - OVERHEAD - sum(self.count(text) for text in texts)


@dataclass(frozen=True)
class Task:
    """A row of the table.

    Attributes:
        make: an item from a source of randomness and the room for it.
        answer_tokens: longest answer.
    """

    make: Callable[[random.Random, Space], Item]
    answer_tokens: int = 64


def make_item(task: Task, name: str, seed: int, space: Space) -> Item:
    """Return the item of that number. It is the same on every machine with the same tokenizer."""
    # Items had a depth once: without the last word they were others than those of the published figures.
    return task.make(random.Random(f"{name}/{seed}/{space.length}/None"), replace(space, number=seed))


def asked_about(document: str, fact: Fact) -> Item:
    """Return the document, followed by the question."""
    turn = Turn(f"{document}\n\n{fact.turn.question}", fact.turn.answer)
    return Item((turn,), (fact.value,), (fact.text,))
