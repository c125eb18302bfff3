"""Finds the passages of a cached prompt that a new one has behind text that it inserts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..adapters.moved_keys import Piece
from ..cache.prefix.nodes import common_length
from ..request import TokenIds

GRAM = 16  # tokens of one hash; a power of 2
_FACTOR = 0x9E3779B97F4A7C15  # odd, with evenly spread bits
_LEAST = 128  # tokens of a passage that is worth its seam; a power of 2


def kept_passages(new: TokenIds, old: TokenIds, start: int) -> list[Piece]:
    """Return the passages of the old prompt from `start` on, where the prompts part, one behind the other.

    Each is as long as both agree. They end where the new prompt lacks the next tokens of the old one.
    """
    ours, found, at, end = hashes(new, _LEAST), list[Piece](), start, start
    while end + _LEAST <= old.size:
        begins = ours[at:] == hashes(old[end : end + _LEAST], _LEAST)
        place = at + int(begins.argmax()) if begins.any() else new.size
        size = common_length(new[place:], old[end:])
        if size < _LEAST:
            break
        found.append(Piece(end, place, size))
        at, end = place + size, end + size
    return found


def hashes(tokens: TokenIds, size: int = GRAM) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `size` tokens, a power of 2; uint64 (M - size + 1,), none of a shorter text."""
    found, factor, length = tokens.astype(np.uint64), _FACTOR, 1
    while length < size:
        found = found[:-length] * np.uint64(factor) + found[length:]
        factor, length = factor * factor % (1 << 64), 2 * length
    return found
