"""The published scoring rules of the tasks. All return a number in [0, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import words


def all_values(prediction: str, values: Sequence[str]) -> float:
    """Return the share of the values that occur, in any case (RULER: string_match_all)."""
    text = prediction.lower()
    return sum(value.lower() in text for value in values) / len(values)


def every_value(prediction: str, values: Sequence[str]) -> float:
    """Return 1 if all values occur, else 0. For answers that are wrong when a part is missing."""
    return float(all_values(prediction, values) == 1)


def last_number(prediction: str, values: Sequence[str]) -> float:
    """Return 1 if the last number of the answer is the value, else 0. Earlier numbers may restate the text."""
    numbers = re.findall(r"\d+", prediction)
    return float(bool(numbers) and numbers[-1] == values[0])


def list_f1(prediction: str, values: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over the named things, out of all that could be listed."""
    named = set(re.findall(r"[a-z]+", prediction.lower())) & set(words.ITEMS)
    right = len(named & set(values))
    return 2 * right / (len(named) + len(values)) if right else 0.0
