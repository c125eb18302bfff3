"""Decides which rows share a forward of a decode step, so that padding costs little. Integers only.

Such a step is bound by what it reads: the weights once per forward, and the caches, in which every row of a forward is
as long as the longest. So rows share a forward if it pads them by fewer bytes than another forward would read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Groups = Sequence[Sequence[int]]  # indices of the rows that share a forward

_STEPS = 64  # within which other groups have to save what they copy; most answers are longer


def group_rows(sizes: Sequence[int], read: int, most: float) -> list[list[int]]:
    """Return the groups of rows that share a forward, shortest rows first.

    Starts with a forward for each row. Joins the two neighbours by length that pads least, as long as that pads by no
    more than a forward less saves.

    Args:
        sizes: bytes of each row's tokens. A longer row is longer in every layer that has a length.
        read: bytes of weights that a forward reads, however many rows it has.
        most: bytes of padding of all groups together.
    """
    groups = [[row] for row in sorted(range(len(sizes)), key=lambda row: sizes[row])]
    while len(groups) > 1:
        added = [_padded(sizes, [[*pair[0], *pair[1]]]) - _padded(sizes, pair) for pair in pairwise(groups)]
        at = added.index(min(added))
        if added[at] > min(read, most):
            break
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
        most -= added[at]
    return groups


def regroup(sizes: Sequence[int], groups: Groups, read: int, most: float) -> list[list[int]]:
    """Return the groups to decode in from now on: `groups`, unless others are needed, or save what they copy.

    Args:
        groups: that the rows are in now.
        sizes, read, most: as in `group_rows`.
    """
    best, now = group_rows(sizes, read, most), [list(group) for group in groups]
    if padding(sizes, now) > most:
        return best
    known = {frozenset(group) for group in now}
    copied = _padded(sizes, [group for group in best if frozenset(group) not in known])
    saved = read * (len(now) - len(best)) + _padded(sizes, now) - _padded(sizes, best)
    return best if _STEPS * saved > 2 * copied else now  # a copy reads and writes


def padding(sizes: Sequence[int], groups: Groups) -> int:
    """Return the bytes by which groups are larger than their rows."""
    return _padded(sizes, groups) - sum(sizes[row] for group in groups for row in group)


def _padded(sizes: Sequence[int], groups: Groups) -> int:
    return sum(len(group) * max((sizes[row] for row in group), default=0) for group in groups)
