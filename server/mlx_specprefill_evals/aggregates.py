"""Documents that must be read as a whole. The answer is how often things occur in them.

Words come from small lists of common words, the same for training and evaluation: a small model can only count words
that it knows. What differs is which words occur and how often.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import haystack, words
from .facts import Turn
from .haystack import Count

POOL = tuple(sorted(set(words.ITEMS) | set(words.PLACES)))
LONG = 16384  # tokens; from here on as many words are asked for as in the published task
HEAD_COUNTS = (12, 8, 5)  # times a common word occurs for each time that another one does


@dataclass(frozen=True)
class Whole:
    """A document, its question, the values of a right answer, and the passages that matter if only some do."""

    document: str
    turn: Turn
    values: tuple[str, ...]
    passages: tuple[str, ...] = ()


def common_words(rng: random.Random, length: int, count: Count, held_out: bool = False) -> Whole:
    """Return a numbered list of shuffled words, a few of them much more common than the rest.

    Where the published task has ten words of equal frequency, short documents have three of different frequencies,
    so that the order of the answer is determined.
    """
    del held_out
    asked = 10 if length >= LONG else len(HEAD_COUNTS)
    pool = rng.sample(POOL, len(POOL))
    head, rest = pool[:asked], pool[asked : asked + max(8, asked * 3)]
    weights = [HEAD_COUNTS[min(i, len(HEAD_COUNTS) - 1)] for i in range(asked)]
    once = [word for word, weight in zip(head, weights, strict=True) for _ in range(weight)] + rest
    rounds = max(1, length // (count("\n100. word") * len(once)))
    lines = _numbered(rng, once * rounds)
    while rounds > 1 and count(lines) > length:
        rounds -= 1
        lines = _numbered(rng, once * rounds)
    answer = f"The most common words are {', '.join(head[:-1])} and {head[-1]}."
    return Whole(lines, Turn(f"What are the {asked} most common words in the list?", answer), tuple(head))


def _numbered(rng: random.Random, listed: list[str]) -> str:
    return "\n".join(f"{i}. {word}" for i, word in enumerate(rng.sample(listed, len(listed)), 1))


def frequent_words(rng: random.Random, length: int, count: Count, held_out: bool = False) -> Whole:
    """Return a stream of words whose frequencies fall with the square of their rank. Rank 1 is noise ("...")."""
    del held_out
    ranks = rng.sample(POOL, min(len(POOL), max(12, length // 50)))
    number = max(40, length // count(" word"))
    stream = _stream(rng, ranks, number)
    while number > 40 and count(" ".join(stream)) > length:
        number = number * 15 // 16
        stream = _stream(rng, ranks, number)
    top = ranks[:3]
    answer = f"The most frequent words are {top[0]}, {top[1]} and {top[2]}."
    turn = Turn("What are the three most frequent words, not counting the dots?", answer)
    return Whole(" ".join(stream), turn, tuple(top))


def _stream(rng: random.Random, ranks: list[str], number: int) -> list[str]:
    """Return about `number` words. A share of 1 / zeta(2) of them are dots."""
    noise = round(number * 0.6)
    weights = [1 / (rank + 2) ** 2 for rank in range(len(ranks))]
    times = [max(1, round((number - noise) * weight / sum(weights))) for weight in weights]
    stream = ["..."] * noise + [word for word, often in zip(ranks, times, strict=True) for _ in range(often)]
    rng.shuffle(stream)
    return stream


def occurrences(
    rng: random.Random,
    length: int,
    count: Count,
    held_out: bool = False,
    most: int = 0,
    filler: Sequence[str] = ("prose",),
) -> Whole:
    """Return a text in which one sentence form with a rare word occurs 3 to 40 times, more often in longer texts.

    `most` is the largest number of times, if the length is not to decide; `filler` names what stands between.
    """
    rare = words.invented_word(rng, held_out, syllables=2)
    times = rng.randint(3, most or min(40, 4 + length // 512))
    passages = tuple(f"Here is one {rare}." for _ in range(times))
    text = haystack.document(rng, passages, filler, length, count, held_out=held_out)
    turn = Turn(f"How many times does the text say that here is one {rare}?", f"The text says so {times} times.")
    return Whole(text, turn, (str(times),), passages[:1])


AGGREGATES: dict[str, Callable[[random.Random, int, Count, bool], Whole]] = {
    "common_words": common_words,
    "frequent_words": frequent_words,
    "occurrences": occurrences,
}
