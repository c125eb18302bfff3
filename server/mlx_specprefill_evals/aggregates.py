"""A document that must be read as a whole: the answer is how often a sentence occurs in it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from . import haystack, words
from .facts import Turn
from .haystack import Count


@dataclass(frozen=True)
class Whole:
    """A document, its question, the values of a right answer, and the passages that matter if only some do."""

    document: str
    turn: Turn
    values: tuple[str, ...]
    passages: tuple[str, ...] = ()


def occurrences(rng: random.Random, length: int, count: Count) -> Whole:
    """Return a text in which one sentence form with a rare word occurs 3 to 40 times, more often in longer texts."""
    rare = words.invented_word(rng, syllables=2)
    times = rng.randint(3, min(40, 4 + length // 512))
    passages = tuple(f"Here is one {rare}." for _ in range(times))
    text = haystack.document(rng, passages, ["prose"], length, count)
    turn = Turn(f"How many times does the text say that here is one {rare}?", f"The text says so {times} times.")
    return Whole(text, turn, (str(times),), passages[:1])
