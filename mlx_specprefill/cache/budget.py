"""Evicts cached prefixes, the least valuable first: one byte budget for target and draft.

The budget covers prefixes of target and draft. It holds no arrays: entries know their size and how to release them.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

# The clock counts look-ups. A store moves it by much less: enough to order entries, not to age them.
_LOOKUP, _STORE = 1.0, 2.0**-10
# Look-ups without a use after which a shared entry loses its priority. A request looks up once for the target, once for
# the draft and once for its session, so a dozen one-off requests are three dozen look-ups.
GRACE = 64.0
# Shared entries have priority up to this part of the limit. The rest is left to new conversations.
SHARED_PART = 7 / 8
# Pinned entries are evicted last, however long they are idle, up to this part of the limit.
PINNED_PART = 1 / 2


@dataclass(eq=False)
class Evictable:
    """An entry that the budget can evict.

    Attributes:
        nbytes: bytes of its arrays.
        hits: look-ups that it served. It is shared from the first one on: two requests used it.
        pinned: it holds a system prompt of many sessions. Takes effect once it is shared.
        used: the budget's clock at its last use; `seen_at` is the same as seconds since the epoch.
        held: whether the budget counts it.
    """

    nbytes: int
    hits: int = field(default=0, init=False)
    pinned: bool = field(default=False, init=False)
    used: float = field(default=0.0, init=False)
    seen_at: float = field(default=0.0, init=False)
    held: bool = field(default=False, init=False)

    @property
    def rank(self) -> int:
        """Return 0 for an entry without a hit, 1 for one with hits, 2 for a pinned one with hits."""
        return 0 if not self.hits else 1 + self.pinned

    def evictable(self) -> bool:
        """Return whether no other entry needs it."""
        return True

    def evict(self) -> None:
        """Release the arrays and call `ByteBudget.remove`."""
        raise NotImplementedError


class ByteBudget:
    """A shared limit on bytes. Storing never takes `used` above `limit`.

    Entries have three ranks, each evicted least recently used first. Entries that served one request go before shared
    ones, unless those have been idle for 64 look-ups or take more than 7/8 of the limit. So a burst of one-off requests
    can't evict a conversation, and old conversations can't keep out new ones. Pinned entries, like an agent's system
    prompt, go last, unless they take more than half of the limit. A new entry evicts only entries that were used before
    the call that stores it, so never the blocks that it continues.

    Attributes:
        most: bytes at most.
        room: returns the bytes that memory has for all entries; asked at each look-up and store.
        limit: the smaller of both, when it was asked last.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.room: Callable[[], float] = lambda: math.inf
        self.limit: float = most
        self.evictions = 0
        self._clock = 0.0
        self._entries = tuple(OrderedDict[Evictable, None]() for _ in range(3))  # by rank, least recently used first
        self._nbytes = [0, 0, 0]  # by rank

    @property
    def used(self) -> int:
        return sum(self._nbytes)

    @property
    def shared(self) -> int:
        """Return the part of `used` that was hit."""
        return self._nbytes[1] + self._nbytes[2]

    def begin_lookup(self) -> None:
        self._clock += _LOOKUP
        self._ask_for_room()

    def begin_store(self) -> None:
        self._clock += _STORE
        self._ask_for_room()

    def _ask_for_room(self) -> None:
        self.limit = min(self.most, self.room())

    def touch(self, entry: Evictable, hit: bool = False, pin: bool = False) -> None:
        """Note that the entry is used now, by a look-up (`hit`), or pin it from its first hit on."""
        if entry.held:
            self._take(entry)
        entry.used, entry.seen_at = self._clock, time.time()
        entry.hits += hit
        entry.pinned = entry.pinned or pin
        if entry.held:
            self._put(entry)

    def _put(self, entry: Evictable) -> None:
        self._entries[entry.rank][entry] = None
        self._nbytes[entry.rank] += entry.nbytes

    def _take(self, entry: Evictable) -> None:
        del self._entries[entry.rank][entry]
        self._nbytes[entry.rank] -= entry.nbytes

    def reserve(self, nbytes: int) -> bool:
        """Evict until `nbytes` bytes are free; return False if not enough may be evicted.

        It evicts nothing if the entries in use leave no room for so many.
        """
        if self.used + nbytes > self.limit and self._used_now + nbytes > self.limit:
            return False
        while self.used + nbytes > self.limit:
            rank, victim = self._lowest()
            if victim is None or rank >= self._clock:
                return False
            self._evict(victim)
        return True

    @property
    def _used_now(self) -> int:
        """Return the bytes of entries that were used since the latest look-up or store began."""
        recent = (takewhile(lambda entry: entry.used >= self._clock, reversed(rank)) for rank in self._entries)
        return sum(entry.nbytes for entries in recent for entry in entries)

    def shrink(self, nbytes: int) -> None:
        """Evict `nbytes` bytes, or all entries, in the usual order, to free memory for other uses."""
        goal = self.used - nbytes
        while self.used > goal:
            _, victim = self._lowest()
            if victim is None:
                return
            self._evict(victim)

    def add(self, entry: Evictable) -> None:
        """Add an entry, as one in use. `reserve` has made room for it."""
        entry.held = True
        self._put(entry)
        self.touch(entry)

    def remove(self, entry: Evictable) -> None:
        """Stop counting an entry; no effect if it isn't counted."""
        if entry.held:
            self._take(entry)
            entry.held = False

    def _lowest(self) -> tuple[float, Evictable | None]:
        """Return the entry to evict next, with its rank on the clock's scale."""
        grace = GRACE if self.shared <= SHARED_PART * self.limit else 0.0
        graces = (0.0, grace, math.inf if self._nbytes[2] <= PINNED_PART * self.limit else grace)
        oldest = (next((entry for entry in entries if entry.evictable()), None) for entries in self._entries)
        ranked = [(entry.used + extra, entry) for entry, extra in zip(oldest, graces, strict=True) if entry is not None]
        return min(ranked, key=lambda pair: pair[0], default=(0.0, None))

    def _evict(self, victim: Evictable) -> None:
        victim.evict()
        assert not victim.held
        self.evictions += 1
