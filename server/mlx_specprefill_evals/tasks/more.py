"""A fact in filler text, and the choice among tools."""

from __future__ import annotations

import random
from itertools import islice

from .. import facts, haystack
from .base import Item, Space, Task, asked_about

TOOLS = 40


def _needle(rng: random.Random, space: Space) -> Item:
    """Return the acceptance test: filler of one or two kinds."""
    kinds = rng.sample(sorted(haystack.FILLERS), rng.choice((1, 2)))
    fact = facts.number_needle(rng)
    budget = space.without(fact.turn.question)
    return asked_about(haystack.document(rng, kinds, budget, space.count, fact.text), fact)


def _tool_choice(rng: random.Random, space: Space) -> Item:
    """Return definitions of 40 tools, or as many as fit, then prose."""
    fact = facts.tool(rng)
    left = space.without(fact.turn.question, fact.text)
    definitions = [fact.text]
    for text in islice(iter(lambda: facts.tool(rng).text, ""), TOOLS - 1):
        size = space.count("\n" + text)
        if size > left:
            break
        definitions.append(text)
        left -= size
    rng.shuffle(definitions)
    tail = haystack.document(rng, ["prose"], left, space.count)
    block = "\n".join(definitions)
    return asked_about(f"{block}\n\n{tail}" if tail else block, fact)


MORE: dict[str, Task] = {"needle": Task(_needle), "tool_choice": Task(_tool_choice)}
