"""Tasks of counting, listing, following updates, two questions in a row, and choosing among tools."""

from __future__ import annotations

import random
from itertools import cycle, islice

from .. import aggregates, facts, haystack, scoring
from ..facts import Turn
from .base import Item, Space, Task, asked_about, within, within_prose

TOOLS, REPEATED = 40, 4


def _needle(rng: random.Random, space: Space) -> Item:
    """Return the acceptance test: filler of one or two kinds."""
    kinds = rng.sample(sorted(haystack.FILLERS), rng.choice((1, 2)))
    filler = iter(lambda: haystack.FILLERS[rng.choice(kinds)](rng), "")
    return within(rng, space, facts.number_needle(rng), filler)


def _needle_in_repeats(rng: random.Random, space: Space) -> Item:
    """Return the acceptance test in four repeating pieces of filler, like text that people copy."""
    kinds = sorted(haystack.FILLERS)
    pool = [haystack.FILLERS[rng.choice(kinds)](rng) for _ in range(REPEATED)]
    return within(rng, space, facts.number_needle(rng), cycle(pool))


def _counting(rng: random.Random, space: Space) -> Item:
    whole = aggregates.occurrences(rng, space.length - 64, space.count)
    return asked_about(whole.document, whole)


def _list_all(rng: random.Random, space: Space) -> Item:
    others = list(facts.tagged_list(rng, 6).pieces)
    return within_prose(rng, space, facts.tagged_list(rng), others=others)


def _order_tracking(rng: random.Random, space: Space) -> Item:
    fact = facts.latest_value(rng)
    item = within_prose(rng, space, fact, others=facts.latest_value(rng, 4).pieces)
    return Item(item.turns, item.values, fact.pieces[-1:])


def _two_turns(rng: random.Random, space: Space) -> Item:
    """Return two needles. The second question follows the first answer and needs another place."""
    first, second = facts.number_needle(rng), facts.number_needle(rng)
    item = within_prose(rng, space, second, others=first.pieces)
    document = item.turns[0].question.removesuffix(second.turn.question)
    opening = Turn(document + first.turn.question, first.turn.answer)
    return Item((opening, second.turn), second.values, second.pieces)


def _tool_choice(rng: random.Random, space: Space) -> Item:
    """Return definitions of 40 tools, or as many as fit, then prose."""
    fact = facts.tool(rng)
    left = space.without(fact.turn.question, *fact.pieces)
    definitions = list(fact.pieces)
    for text in islice(iter(lambda: facts.tool(rng).pieces[0], ""), TOOLS - 1):
        size = space.count("\n" + text)
        if size > left:
            break
        definitions.append(text)
        left -= size
    rng.shuffle(definitions)
    tail = haystack.document(rng, (), ["prose"], left, space.count)
    block = "\n".join(definitions)
    return asked_about(f"{block}\n\n{tail}" if tail else block, fact)


MORE: dict[str, Task] = {
    "needle": Task(_needle, scoring.all_values, has_depth=True),
    "needle_repeating": Task(_needle_in_repeats, scoring.all_values, has_depth=True),
    "counting": Task(_counting, scoring.last_number),
    "list_all": Task(_list_all, scoring.list_f1, 192),
    "order_tracking": Task(_order_tracking, scoring.last_number),
    "two_turns": Task(_two_turns, scoring.all_values, has_depth=True),
    "tool_choice": Task(_tool_choice, scoring.all_values),
}
