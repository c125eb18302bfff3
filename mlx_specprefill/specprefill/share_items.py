"""Questions by which `auto` learns how much to keep: one thing, several things, or all of a text is asked for.

What is asked for by `copy`, `needle` and `paraphrase` is in one place; by `several` and `two` in more; a `count` and
`whole` need every token. Questions of the last two kinds are worded in several ways, not all of which say so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .calibration_items import CalibrationItem, calibration_item, document, inserted, invented_name

__all__ = ["SHARE_KINDS", "share_items"]

SHARE_KINDS = ("copy", "needle", "paraphrase", "several", "two", "count", "whole")
_CHARACTERS = (1200, 4000)  # some 300 to 1000 tokens
_GUESTS = "a baker,a diver,a farmer,a judge,a painter,a pilot,a poet,a singer,a smith,a teacher".split(",")
_COUNTS = (
    "How many times was {} seen?",
    "How often is it said that {} was seen?",
    "Count the lines that say that {} was seen.",
    "What is the number of times that {} was seen?",
    "Give me the total of all sightings of {}.",
    "Was {} seen an odd or an even number of times?",
)
_WHOLES = (
    "Summarise the text.",
    "Give a short overview of what is said.",
    "Translate the text into French.",
    "Rewrite the text in simpler words.",
    "List all functions that are mentioned.",
    "Which word occurs most often?",
    "What are the main points?",
    "What is the text about as a whole?",
    "Turn this into a table, one row per paragraph.",
    "Does the text contradict itself anywhere?",
    "Repeat what was said, word for word.",
    "In one sentence, what does the author want to say?",
)


def share_items(number: int, seed: int = 0) -> Iterator[CalibrationItem]:
    """`number` items of each kind in turn, each on a document of its own; the same ones for the same Python."""
    for index in range(number):
        for kind in SHARE_KINDS:
            rng = random.Random(f"share/{kind}/{seed}/{index}")
            yield _item(kind, rng, document(rng, rng.randint(*_CHARACTERS)))


def _item(kind: str, rng: random.Random, text: str) -> CalibrationItem:
    makers = {"several": _several, "two": _two, "count": _count, "whole": _whole}
    return makers[kind](rng, text) if kind in makers else calibration_item(kind, rng, text)


def _several(rng: random.Random, text: str) -> CalibrationItem:
    """Two to five lines about one name."""
    name = invented_name(rng)
    lines = [f"{name} was visited by {guest}." for guest in rng.sample(_GUESTS, rng.randint(2, 5))]
    return _with("several", rng, text, lines, f"Who visited {name}?")


def _two(rng: random.Random, text: str) -> CalibrationItem:
    """Two lines, one for each of two names that are asked for together."""
    names = [invented_name(rng), invented_name(rng)]
    lines = [f"The parcel for {name} weighs {rng.randrange(100, 999)} grams." for name in names]
    return _with("two", rng, text, lines, "What do the parcels for {} and {} weigh?".format(*names))


def _with(kind: str, rng: random.Random, text: str, lines: list[str], question: str) -> CalibrationItem:
    for line in lines:
        text = inserted(rng, text, line)
    return CalibrationItem(kind, text, question, lines[0], tuple(lines[1:]))


def _count(rng: random.Random, text: str) -> CalibrationItem:
    name = invented_name(rng)
    for _ in range(rng.randint(2, 12)):
        text = inserted(rng, text, f"{name} was seen.")
    return CalibrationItem("count", text, rng.choice(_COUNTS).format(name), text)


def _whole(rng: random.Random, text: str) -> CalibrationItem:
    return CalibrationItem("whole", text, rng.choice(_WHOLES), text)
