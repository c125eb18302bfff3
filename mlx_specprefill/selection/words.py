"""Raises the importance of lines that share rare words with the question.

A small draft's heads hardly tell lines apart that look alike: records, imports, messages of a log. The name that the
question is about stands in few of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from ..arrays import Floats
from .text import PromptText

_MARK = "\ud800"  # in front of a line; no text has it
_WORD = re.compile(rf"\w\w+|{_MARK}")
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
    others = ~np.logical_or.reduceat(asks, text.units)
    wanted = _WORD.findall(_MARK.join("".join(text.pieces[start:end]) for start, end in asking).lower())
    numbers = {word: number for number, word in enumerate(dict.fromkeys([_MARK, *wanted]))}
    marked = np.insert(np.array(text.pieces, dtype=object), text.units, _MARK).tolist()
    found = np.fromiter(map(numbers.get, _WORD.findall("".join(marked).lower()), repeat(-1)), dtype=np.int64)
    line = np.cumsum(found == 0) - 1
    shared = (found > 0) & others[line]
    line, word = np.divmod(np.unique(line[shared] * len(numbers) + found[shared]), len(numbers))
    rarity = 1 - np.log(np.bincount(word)[word]) / np.log(max(int(np.count_nonzero(others)), 2))
    gain = np.bincount(line, rarity, minlength=text.units.size)
    factors = (1 + _RAISED * np.minimum(gain / _ENOUGH, 1)).astype(np.float32)
    return np.repeat(factors, sizes)
