"""Caches of whole conversations after a sparse prefill. Never a source of dense prefixes.

A sparse cache depends on the question it was made for. It can be extended, or cut back and then extended, but not
shared. It is kept under the full list of tokens that it stands for: prompt and answer, dropped tokens included.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..cache.budget import ByteBudget, Evictable
from ..cache.entry import CacheEntry, CacheHit
from ..cache.positioned import can_cut, cut, leaves
from ..cache.prefix.nodes import block_digest, common_length, root_digest
from ..request import SHARED, CacheLabel, TokenIds
from ..specprefill.staged_prefill import HiddenStates

__all__ = ["Session", "SessionStore"]


@dataclass(frozen=True, slots=True)
class Session:
    """A sparse turn that can be extended: it stands for `length` tokens and holds those at `kept` (int32).

    `hidden`: of a staged turn, whose cache is that of the layers behind the first ones, what these passed on.
    """

    length: int
    cache: list[Any]
    kept: npt.NDArray[np.int32]
    hidden: HiddenStates | None = None

    @property
    def held(self) -> npt.NDArray[np.bool_]:
        """(length,) whether a token is held."""
        held = np.zeros(self.length, dtype=np.bool_)
        held[self.kept] = True
        return held


class _Session(Evictable):
    def __init__(
        self,
        siblings: dict[bytes, _Session],
        budget: ByteBudget,
        tokens: TokenIds,
        cache: list[Any],
    ) -> None:
        super().__init__(sum(int(part.nbytes) for part in leaves(cache)))
        self._siblings = siblings
        self._budget = budget
        self.key = tokens.tobytes()
        self.tokens = tokens
        self.cache = cache

    def common(self, tokens: TokenIds) -> int:
        """How many of `tokens` its cache can stand for: of caches that can't be cut all of its key, or none."""
        common = common_length(self.tokens, tokens)
        return common if common == self.tokens.size or can_cut(self.cache) else 0

    def evict(self) -> None:
        del self._siblings[self.key]
        self.cache = []
        self._budget.remove(self)


class SessionStore:
    """Caches in memory, used on the MLX thread.

    A namespace is everything but the tokens that a cache depends on: target, draft, keep share, selection rule. Entries
    of one namespace are never seen from another, nor those of one label from another.

    Args:
        budget: bytes in memory, possibly shared with other caches.
    """

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._sessions: dict[tuple[str, CacheLabel], dict[bytes, _Session]] = {}

    def __len__(self) -> int:
        return sum(len(sessions) for sessions in tuple(self._sessions.values()))

    @property
    def nbytes(self) -> int:
        """Of all sessions; from any thread."""
        stores = tuple(self._sessions.values())
        return sum(session.nbytes for sessions in stores for session in tuple(sessions.values()))

    def covers(self, tokens: Sequence[int] | TokenIds, label: CacheLabel = SHARED, namespace: str | None = None) -> int:
        """How many tokens a session of the label stands for, in one namespace or in any. Nothing is counted by it."""
        wanted = np.asarray(tokens, dtype=np.int32)
        places = (
            sessions
            for (name, theirs), sessions in self._sessions.items()
            if theirs == label and namespace in (None, name)
        )
        return max((one.common(wanted) for sessions in places for one in sessions.values()), default=0)

    def lookup(self, namespace: str, tokens: Sequence[int] | TokenIds, label: CacheLabel = SHARED) -> CacheHit | None:
        """A copy of the cache that stands for the most of `tokens`, and of one that is cut for half of them at least.

        Clients change what was said: a cache is cut back to where its key differs, if it can be.
        """
        self._budget.begin_lookup()
        wanted = np.asarray(tokens, dtype=np.int32)
        found = [
            (length, length == session.tokens.size, session)
            for session in self._sessions.get((namespace, label), {}).values()
            if (length := session.common(wanted))
        ]
        usable = [one for one in found if one[1] or 2 * one[0] >= wanted.size]
        if not usable:
            return None
        length, _, session = max(usable, key=lambda one: one[:2])
        self._budget.touch(session, hit=True)
        cache = copy.deepcopy(session.cache)
        cut(cache, session.tokens.size - length)
        return CacheHit(length, cache)

    def store(
        self, namespace: str, tokens: Sequence[int] | TokenIds, cache: list[Any], label: CacheLabel = SHARED
    ) -> bool:
        """Keep a cache under its logical tokens in place of the caches that it extends; False when there is no room.

        Args:
            cache: the store's own from here on.
        """
        self._budget.begin_store()
        ids = np.array(tokens, dtype=np.int32)  # its own: the caller's may be a part of something larger
        key = ids.tobytes()
        # Clients choose labels: empty ones must not pile up.
        self._sessions = {place: sessions for place, sessions in self._sessions.items() if sessions}
        sessions = self._sessions.setdefault((namespace, label), {})
        extended = [session for old, session in sessions.items() if key[: len(old)] == old]
        session = _Session(sessions, self._budget, ids, cache)
        session.hits = max((old.hits for old in extended), default=0)
        for old in extended:
            old.evict()
        if not self._budget.reserve(session.nbytes):
            return False
        self._budget.touch(session)
        self._budget.add(session)
        sessions[key] = session
        return True

    def entries(self) -> list[CacheEntry]:
        """The stored sessions, last used first."""
        entries = [
            CacheEntry(
                id=_name(place, one),
                kind="session",
                tokens=one.tokens.size,
                nbytes=one.nbytes,
                hits=one.hits,
                last_use=one.seen_at,
                label=place[1],
            )
            for place, sessions in self._sessions.items()
            for one in sessions.values()
        ]
        return sorted(entries, key=lambda entry: entry.last_use, reverse=True)

    def drop(self, entry_id: str, owner: str | None = None) -> bool:
        """Forget one; False when there is none of that name.

        Args:
            owner: drop it only if it is theirs.
        """
        named = (
            session
            for place, sessions in self._sessions.items()
            for session in sessions.values()
            if owner in (None, place[1].owner) and _name(place, session) == entry_id
        )
        session = next(named, None)
        if session is not None:
            session.evict()
        return session is not None

    def clear(self, owner: str | None = None) -> None:
        """Forget every session, or every session of one owner."""
        for (_, label), sessions in self._sessions.items():
            if owner in (None, label.owner):
                for session in list(sessions.values()):
                    session.evict()


def _name(place: tuple[str, CacheLabel], session: _Session) -> str:
    namespace, label = place
    return block_digest(root_digest(f"{namespace}@{label.owner}/{label.salt}", 0), session.tokens).hex()
