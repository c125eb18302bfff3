"""A file as it would be without our change, although others have changed it since."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

__all__ = ["without_ours"]

_Change = tuple[int, int, list[str]]  # lines [start, end) of what we wrote, and what replaces them


def without_ours(before: str, ours: str, now: str) -> str | None:
    """`now` with the way from `before` to `ours` taken back; None: others have changed the same lines.

    Args:
        before: the file before our change.
        ours: as we wrote it.
        now: as it is.
    """
    if now in (ours, before):
        return before
    lines = ours.splitlines(keepends=True)
    back, theirs = _changes(lines, before), _changes(lines, now)
    if any(_collide(one, other) for one in back for other in theirs):
        return None
    for start, end, new in sorted([*back, *theirs], key=lambda change: change[:2], reverse=True):
        lines[start:end] = new
    return "".join(lines)


def _changes(lines: Sequence[str], text: str) -> list[_Change]:
    other = text.splitlines(keepends=True)
    steps = SequenceMatcher(None, lines, other, autojunk=False).get_opcodes()
    return [(i, j, other[k:m]) for kind, i, j, k, m in steps if kind != "equal"]


def _collide(one: _Change, other: _Change) -> bool:
    """Whether they touch the same lines, or put something at the same place."""
    return one[:2] == other[:2] or (one[0] < other[1] and other[0] < one[1])
