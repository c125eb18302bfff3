"""Raises the importance of lines that share rare words with the question.

A small draft's heads hardly tell lines apart that look alike: records, imports, messages of a log. The name that the
question is about stands in few of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ..arrays import Floats
from .text import PromptText

_WORD = re.compile(r"\w\w+")
_RAISED = 0.5  # of its importance, that a line gains at most; with twice as much what is asked in other words is lost
_ENOUGH = 2  # words that stand in one line only, for which it gains that


def word_factors(text: PromptText, asking: Sequence[tuple[int, int]]) -> Floats:
    """Return a factor for the importance of each token, float32 (M,), from 1 to 1.5, one within a line or sentence.

    A line gains by the words that it shares with the question, each by the logarithm of how rare it is among the lines.
    Lines that ask gain nothing.

    Args:
        asking: [start, end) of the tokens that ask.
    """
    sizes = np.diff(np.append(text.units, len(text.pieces)))
    asks = np.zeros(len(text.pieces), dtype=np.bool_)
    for start, end in asking:
        asks[start:end] = True
    wanted = set().union(*(_words("".join(text.pieces[start:end])) for start, end in asking))
    others = np.flatnonzero(~np.logical_or.reduceat(asks, text.units))
    lines = [
        wanted & _words("".join(text.pieces[at : at + size]))
        for at, size in zip(text.units[others], sizes[others], strict=True)
    ]
    counts = Counter(word for line in lines for word in line)
    rarity = {word: 1 - np.log(count) / np.log(max(len(lines), 2)) for word, count in counts.items()}
    factors = np.ones(sizes.size, dtype=np.float32)
    factors[others] += [_RAISED * min(sum(map(rarity.__getitem__, line)) / _ENOUGH, 1) for line in lines]
    return np.repeat(factors, sizes)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.lower()))
