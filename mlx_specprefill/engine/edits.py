"""Finds the passages that a prompt still shares with a cached one behind an edit: an insertion, removal or change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..adapters.moved_keys import Piece
from ..cache.prefix.nodes import common_length
from ..request import TokenIds

GRAM = 16  # tokens of one hash; a power of 2
_FACTOR = 0x9E3779B97F4A7C15  # odd, with evenly spread bits
_LEAST = 128  # tokens of a passage that is worth its seam
_TRIES = 128  # places that are looked at: each takes a moment


def shared_passages(new: TokenIds, old: TokenIds, start: int) -> list[Piece]:
    """Return the passages from `start` on, where the prompts part, in the order that both have them in.

    Each begins at the next run of `GRAM` tokens that the rest of the old prompt has, too, and is as long as both agree.
    """
    if min(new.size, old.size) < start + GRAM:
        return []
    ours, theirs = hashes(new[start:]), hashes(old[start:])
    last, found, at, reached = _last_places(ours, theirs), list[Piece](), 0, 0
    for _ in range(_TRIES):
        rest = np.flatnonzero(last[at:] >= reached)
        if not rest.size:
            break
        at += int(rest[0])
        place = reached + int((theirs[reached:] == ours[at]).argmax())
        size = common_length(new[start + at :], old[start + place :])
        if size >= _LEAST:
            found.append(Piece(start + place, start + at, size))
            reached = place + size
        at += max(size, 1)
    return found


def _last_places(hashed: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return where each hash stands last among the others; -1 if nowhere."""
    by_hash = np.argsort(others, kind="stable")
    last = by_hash[np.maximum(np.searchsorted(others[by_hash], hashed, side="right") - 1, 0)]
    return np.where(others[last] == hashed, last, -1)


def hashes(tokens: TokenIds) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `GRAM` tokens, uint64 (M - GRAM + 1,); none of a shorter text."""
    found, factor, length = tokens.astype(np.uint64), _FACTOR, 1
    while length < GRAM:
        found = found[:-length] * np.uint64(factor) + found[length:]
        factor, length = factor * factor % (1 << 64), 2 * length
    return found
