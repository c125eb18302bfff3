"""Raises the importance of lines that share rare words with the question.

A small draft's heads hardly tell lines apart that look alike: records, imports, messages of a log. The name that the
question is about stands in few of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Indices

Hashes = npt.NDArray[np.uint64]

_WORD = re.compile(r"\w+")
_LEAST = 2  # characters of a word
_RAISED = 0.5  # of its importance, that a line gains at most; with twice as much what is asked in other words is lost
_ENOUGH = 2  # words that stand in one line only, for which it gains that
_BASE = 0x9E3779B97F4A7C15  # of the hash of a word's characters; odd, with evenly spread bits


class Words(NamedTuple):
    """Words of a prompt, in reading order: runs of letters, digits and underscores of two or more characters.

    Attributes:
        starts: their first tokens, int32 (W,).
        hashes: equal for equal words, however they are capitalised or cut into tokens; uint64 (W,).
    """

    starts: Indices
    hashes: Hashes


class TokenWord(NamedTuple):
    """The first word of a token's text, or a part of one.

    Attributes:
        hash: of its characters, uint64; 0 if the text has none.
        length: of it, in characters.
        goes_on: the text begins with it, so that it may go on the word before.
        stays_open: the text ends with it, so that the next token may go on.
    """

    hash: int = 0
    length: int = 0
    goes_on: bool = False
    stays_open: bool = False


NO_WORDS = Words(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint64))
TOKEN_WORD = np.dtype(
    [("hash", np.uint64), ("length", np.int32), ("goes_on", np.bool_), ("stays_open", np.bool_)], align=True
)


def word_of(text: str) -> TokenWord:
    """Return the word in a token's text, without its case."""
    found = _WORD.search(text)
    if found is None:
        return TokenWord()
    characters, hashed = found.group().lower(), 0
    for character in reversed(characters):
        hashed = (hashed * _BASE + ord(character) + 1) % (1 << 64)
    return TokenWord(hashed, len(characters), found.start() == 0, found.end() == len(text))


def join_words(tokens: npt.NDArray[np.void]) -> Words:
    """Return the words of tokens, `TOKEN_WORD` (M,).

    The hash of two parts is that of the first, and that of the second times the base to the power of the first's
    length.
    """
    at = np.flatnonzero(tokens["length"] > 0).astype(np.int32)
    if not at.size:
        return NO_WORDS
    parts = tokens[at]
    joined = np.zeros(at.size, dtype=np.bool_)
    joined[1:] = parts["goes_on"][1:] & parts["stays_open"][:-1] & (np.diff(at) == 1)
    begins = np.flatnonzero(~joined)
    before = np.append(0, np.cumsum(parts["length"], dtype=np.int64))
    of_word = np.cumsum(~joined) - 1
    inside = before[:-1] - before[begins][of_word]  # characters of the word in front of each part
    powers = np.cumprod(np.append(np.uint64(1), np.full(int(inside.max()), _BASE, dtype=np.uint64)))
    hashes = np.add.reduceat(parts["hash"] * powers[inside], begins)
    long = np.add.reduceat(parts["length"], begins) >= _LEAST
    return Words(at[begins[long]], hashes[long])


def word_factors(units: Indices, words: Words, asking: Sequence[tuple[int, int]], length: int) -> Floats:
    """Return a factor for the importance of each token, float32 (M,), from 1 to 1.5, one within a line or sentence.

    A line gains by the words that it shares with the question, each by the logarithm of how rare it is among the lines.
    Lines that ask gain nothing.

    Args:
        units: of `PromptText`.
        asking: [start, end) of the tokens that ask.
        length: M.
    """
    ends = np.append(units[1:], length)
    wanted, asks = np.zeros(words.starts.size, dtype=np.bool_), np.zeros(units.size, dtype=np.bool_)
    for start, end in asking:
        wanted |= (words.starts >= start) & (words.starts < end)
        asks |= (units < end) & (ends > start)
    names = np.unique(words.hashes[wanted])
    of_unit = np.searchsorted(units, words.starts, side="right") - 1
    shared = np.isin(words.hashes, names) & ~asks[of_unit]
    others = units.size - np.count_nonzero(asks)
    if not shared.any() or others == 1:
        return np.ones(length, dtype=np.float32)
    once = np.unique(of_unit[shared] * names.size + np.searchsorted(names, words.hashes[shared]))
    lines, numbers = np.divmod(once, names.size)
    counts = np.bincount(numbers, minlength=names.size)
    rarity = 1 - np.log(np.maximum(counts, 1)) / np.log(others)  # 1: in one line, 0: in all
    weights = np.bincount(lines, rarity[numbers], units.size)
    factors = 1 + _RAISED * np.minimum(weights / _ENOUGH, 1)
    return np.repeat(factors.astype(np.float32), ends - units)
