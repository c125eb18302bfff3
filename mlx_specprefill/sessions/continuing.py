"""How a sparse prefill follows an earlier sparse turn of its conversation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..cache.positioned import can_cut, cut
from ..config import SpecPrefillPolicy
from ..specprefill.selector import Selection, missing_of
from .splice import can_splice
from .store import Session

__all__ = ["Beginning", "Continuation", "Continuing"]

Continuation = Literal["extend", "repair", "restart"]
Indices = npt.NDArray[np.int32]
_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the target has still to read, and in which order. All are prompt indices, ascending.

    Attributes:
        continuation: how it follows the earlier turn; None where there is none.
        cache: of the target, changed by no one else; None: the one with the dense prefix.
        held: what that cache holds.
        missing: to be put between those first.
        start: from here on nothing is held.
        kept: to be read from there on.
    """

    held: Indices
    missing: Indices
    start: int
    kept: Indices
    continuation: Continuation | None = None
    cache: list[Any] | None = None

    @property
    def read(self) -> int:
        """Tokens to read."""
        return int(self.missing.size + self.kept.size)

    @property
    def all_kept(self) -> Indices:
        """What the cache holds when everything is read."""
        return np.concatenate([np.sort(np.concatenate([self.held, self.missing])), self.kept])


class Continuing:
    """Chooses between the ways on and opens the cache for it.

    extend: the session holds what the question asks for; only what is new is read.
    repair: it lacks some of it; the missing chunks are put in at their places, then what is new is read.
    restart: it lacks more than `repair_share` of what is chosen of the old text, or can't be opened; it is read anew
        from where the first chunk is missing, or, where it can't be cut, from the dense prefix on.
    """

    def __init__(self, policy: SpecPrefillPolicy, selects: Callable[[int, int, int], bool]) -> None:
        """Args:
        selects: whether it pays to read only so many of so many new tokens behind so many others (`Planner.selects`).
        """
        self._policy = policy
        self._selects = selects

    def begin(
        self, M: int, S: int, selection: Selection, first: int, session: Session | None, stands_out: float
    ) -> Beginning:
        """Where a prompt of `M` tokens goes on whose dense prefix has `S`; opens the session's cache.

        Args:
            selection: of the prompt from `first` on; its indices count from there.
            first: where the chunk begins that the dense prefix ends in.
            session: the earlier turn.
            stands_out: of `threshold_of`.
        """
        wanted = selection.kept[selection.kept >= S - first] + np.int32(first)
        afresh = Beginning(np.arange(S, dtype=np.int32), _NONE, S, wanted)
        if session is None or session.length <= S:
            return afresh
        missing = missing_of(selection, session.held[first:], stands_out)
        way = self._way(missing, wanted, session)
        if way != "restart":
            new = self._new(M, session, wanted)
            return Beginning(session.kept, missing + np.int32(first), session.length, new, way, session.cache)
        start = first + int(missing[0])
        if start <= S or not can_cut(session.cache):
            return replace(afresh, continuation=way)
        cut(session.cache, session.length - start)
        held, kept = session.kept[session.kept < start], wanted[wanted >= start]
        return Beginning(held, _NONE, start, kept, way, session.cache)

    def _way(self, missing: Indices, wanted: Indices, session: Session) -> Continuation:
        if not missing.size:
            return "extend"
        most = self._policy.repair_share * int((wanted < session.length).sum())
        return "repair" if missing.size <= most and can_splice(session.cache) else "restart"

    def _new(self, M: int, session: Session, wanted: Indices) -> Indices:
        """All of a short addition, the selected part of one that is long enough for that to pay."""
        some = wanted[wanted >= session.length]
        if self._selects(M - session.length, int(some.size), int(session.kept.size)):
            return some
        return np.arange(session.length, M, dtype=np.int32)
