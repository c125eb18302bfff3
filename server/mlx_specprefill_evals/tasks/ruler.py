"""The thirteen tasks of RULER (arXiv 2404.06654), rebuilt without its word lists, essays and data sets.

The hidden facts, their number and the scoring are those of RULER. The wording, names, six-digit numbers, prose in place
of essays and synthetic documents are our own. Never compare the results with published figures.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat

from .. import aggregates, facts, haystack, scoring, words
from ..aggregates import Whole
from ..facts import Fact
from .base import Item, Space, Task, asked_about, within, within_prose

__all__ = ["RULER"]

Build = Callable[[random.Random, bool], Fact]


def _needle_in_noise(rng: random.Random, space: Space) -> Item:
    return within(rng, space, facts.number_needle(rng, True), repeat(haystack.NOISE))


def _needle_in_prose(build: Build, rng: random.Random, space: Space) -> Item:
    return within_prose(rng, space, build(rng, True))


def _four_keys(rng: random.Random, space: Space) -> Item:
    others = [facts.number_needle(rng, True).pieces[0] for _ in range(3)]
    return within_prose(rng, space, facts.number_needle(rng, True), others=others)


def _needles_only(build: Build, rng: random.Random, space: Space) -> Item:
    """Return a document in which every line is a needle."""
    asked = build(rng, True)
    return within(rng, space, asked, iter(lambda: "\n" + build(rng, True).pieces[0], ""))


def _chain(rng: random.Random, space: Space) -> Item:
    return within(rng, space, facts.variable_chain(rng, True), repeat(haystack.NOISE))


def _documents(build: Build, rng: random.Random, space: Space) -> Item:
    """Return the paragraphs with the answer, among paragraphs of the same kind about others."""
    return within(rng, space, build(rng, True), _paragraphs(rng))


def _paragraphs(rng: random.Random) -> Iterator[str]:
    while True:
        person, firm = words.person(rng, True), words.firm(rng, True)
        city = words.invented_word(rng, True, syllables=2).capitalize()
        yield f"\n{person} works at {firm}." if rng.random() < 0.5 else f"\n{firm} is in {city}."
        yield haystack.prose(rng, True)


def _whole(build: Callable[..., Whole], rng: random.Random, space: Space) -> Item:
    whole = build(rng, space.length - 64, space.count, True)
    return asked_about(whole.document, whole)


RULER: dict[str, Task] = {
    "niah_single_1": Task(_needle_in_noise, scoring.all_values, has_depth=True),
    "niah_single_2": Task(partial(_needle_in_prose, facts.number_needle), scoring.all_values, has_depth=True),
    "niah_single_3": Task(partial(_needle_in_prose, facts.uuid_needle), scoring.all_values, has_depth=True),
    "niah_multikey_1": Task(_four_keys, scoring.all_values, has_depth=True),
    "niah_multikey_2": Task(partial(_needles_only, facts.number_needle), scoring.all_values, has_depth=True),
    "niah_multikey_3": Task(partial(_needles_only, facts.uuid_key), scoring.all_values, 96, has_depth=True),
    "niah_multivalue": Task(partial(_needle_in_prose, facts.several_values), scoring.all_values, 128),
    "niah_multiquery": Task(partial(_needle_in_prose, facts.several_questions), scoring.all_values, 128),
    "vt": Task(_chain, scoring.all_values, 128),
    "cwe": Task(partial(_whole, aggregates.common_words), scoring.all_values, 120),
    "fwe": Task(partial(_whole, aggregates.frequent_words), scoring.all_values),
    "qa_1": Task(partial(_documents, facts.one_hop), scoring.any_value),
    "qa_2": Task(partial(_documents, facts.two_hops), scoring.any_value),
}
