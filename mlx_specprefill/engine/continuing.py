"""How a sparse prefill follows an earlier sparse turn of its conversation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cache.positioned import can_cut, cut
from ..cache.splice import can_splice
from ..config import SelectionConfig, SpecPrefillPolicy
from ..prefill.selection import Selection, missing_of
from ..request import GenerationRequest
from .caches import EngineCaches, Session
from .planning import Planner
from .sequence import Continuation, Sequence

__all__ = ["Beginning", "Continuing", "usable_prefix"]

Indices = npt.NDArray[np.int32]
_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What the target has still to read, and in which order. All are prompt indices, ascending.

    Attributes:
        held: what its cache holds.
        missing: to be put between those first.
        start: from here on nothing is held.
        kept: to be read from there on.
    """

    held: Indices
    missing: Indices
    start: int
    kept: Indices

    @property
    def read(self) -> int:
        """Tokens to read."""
        return int(self.missing.size + self.kept.size)

    @property
    def all_kept(self) -> Indices:
        """What the cache holds when everything is read."""
        return np.concatenate([np.sort(np.concatenate([self.held, self.missing])), self.kept])


class Continuing:
    """Chooses between the ways on and prepares the sequence's cache for it.

    extend: the session holds what the question asks for; only what is new is read.
    repair: it lacks some of it; the missing chunks are put in at their places, then what is new is read.
    restart: it lacks more than `repair_share` of what is chosen of the old text, or can't be opened; it is read anew
        from where the first chunk is missing, or, where it can't be cut, from the dense prefix on.
    """

    def __init__(
        self, policy: SpecPrefillPolicy, selection: SelectionConfig, caches: EngineCaches, planner: Planner
    ) -> None:
        self._policy = policy
        self._stands_out = selection.stands_out
        self._caches = caches
        self._planner = planner

    def begin(self, sequence: Sequence, selection: Selection, first: int) -> Beginning:
        """Where a sequence goes on that holds its dense prefix; changes its cache and says how in `continuation`.

        Args:
            selection: of the prompt from `first` on; its indices count from there.
            first: where the chunk begins that the dense prefix ends in.
        """
        plan, S = sequence.plan, sequence.cached
        assert plan is not None
        wanted = selection.kept[selection.kept >= S - first] + np.int32(first)
        afresh = Beginning(np.arange(S, dtype=np.int32), _NONE, S, wanted)
        session = self._session(sequence.request, plan.choice)
        if session is None or session.length <= S:
            return afresh
        held = session.held[first:]
        missing = missing_of(selection, held, self._stands_out)
        sequence.continuation = self._way(missing, wanted, session)
        if sequence.continuation != "restart":
            sequence.cache = session.cache
            new = self._new(len(sequence.request.prompt), session, wanted)
            return Beginning(session.kept, missing + np.int32(first), session.length, new)
        start = first + int(missing[0])
        if start <= S or not can_cut(session.cache):
            return afresh
        cut(session.cache, session.length - start)
        sequence.cache = session.cache
        return Beginning(session.kept[session.kept < start], _NONE, start, wanted[wanted >= start])

    def _session(self, request: GenerationRequest, choice: str) -> Session | None:
        """An earlier sparse turn of the conversation; a caller's own scores mean what they say."""
        if request.specprefill.importance is not None:
            return None
        return self._caches.session(request.prompt[: usable_prefix(request)], choice, request.label)

    def _way(self, missing: Indices, wanted: Indices, session: Session) -> Continuation:
        if not missing.size:
            return "extend"
        most = self._policy.repair_share * int((wanted < session.length).sum())
        return "repair" if missing.size <= most and can_splice(session.cache) else "restart"

    def _new(self, M: int, session: Session, wanted: Indices) -> Indices:
        """All of a short addition, the selected part of one that is long enough for that to pay."""
        some = wanted[wanted >= session.length]
        if self._planner.selects(M - session.length, int(some.size), int(session.kept.size)):
            return some
        return np.arange(session.length, M, dtype=np.int32)


def usable_prefix(request: GenerationRequest) -> int:
    """How many cached prompt tokens a request may start from.

    The last token must be fed for its logits. A request that forces sparse prefill means its newest message: what is
    kept of that must not depend on whether an earlier request happened to leave a dense copy.
    """
    if request.prompt_logprobs is not None:
        return 0
    if request.specprefill.enabled:
        return request.spans[-1].start if request.spans else 0
    return len(request.prompt) - 1
