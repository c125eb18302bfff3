"""The number of examples of a property."""

from hypothesis import settings

QUICK = 50


def examples(number: int) -> int:
    """Return the number for the whole suite, and at most `QUICK` in the part for every change."""
    whole = settings.get_profile("quick").max_examples < settings.default.max_examples
    return number if whole else min(number, QUICK)
