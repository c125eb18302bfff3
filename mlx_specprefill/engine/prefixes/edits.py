"""Finds the passages of a cached prompt that a new one has behind text that it inserts, changes or lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...adapters.moved_keys import Piece
from ...cache.prefix.nodes import common_length
from ...request import TokenIds

GRAM = 16  # tokens of one hash; a power of 2
_FACTOR = 0x9E3779B97F4A7C15  # odd, with evenly spread bits
_LEAST = 128  # tokens of a passage that is worth its seam; a power of 2


def kept_passages(new: TokenIds, old: TokenIds, start: int) -> list[Piece]:
    """Return the passages of both prompts from `start` on, where they part, one behind the other in both.

    Each is as long as both agree.
    """
    ours, theirs, found, at, end = hashes(new, _LEAST), hashes(old, _LEAST), list[Piece](), start, start
    last, places = _last_places(theirs, ours).tolist(), ours.tolist()
    while (first := next((old for old in range(end, len(last)) if last[old] >= at), None)) is not None:
        place = places.index(int(theirs[first]), at)
        size = common_length(new[place:], old[first:])
        if size < _LEAST:  # two texts have one hash
            break
        found.append(Piece(first, place, size))
        at, end = place + size, first + size
    return found


def _last_places(ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return where each of our hashes stands last among theirs; -1 where it does not."""
    if not theirs.size:
        return np.full(ours.size, -1)
    order = np.argsort(theirs, kind="stable")
    last = order[np.searchsorted(theirs, ours, "right", sorter=order) - 1]
    return np.where(theirs[last] == ours, last, -1)


def hashes(tokens: TokenIds, size: int = GRAM) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `size` tokens, a power of 2; uint64 (M - size + 1,), none of a shorter text."""
    found, factor, length = tokens.astype(np.uint64), _FACTOR, 1
    while length < size:
        found = found[:-length] * np.uint64(factor) + found[length:]
        factor, length = factor * factor % (1 << 64), 2 * length
    return found
