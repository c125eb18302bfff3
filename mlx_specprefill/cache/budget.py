"""One byte budget for all cached prefixes, and its order of eviction.

The budget covers prefixes of target and draft. It holds no arrays: entries know their size and how to release them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time

# The clock counts look-ups. A store moves it by much less: enough to order entries, not to age them.
_LOOKUP, _STORE = 1.0, 2.0**-10
# Look-ups without a use after which a shared entry loses its priority. A request looks up once for the target, once for
# the draft and once for its session, so a dozen one-off requests are three dozen look-ups.
GRACE = 64.0
# Shared entries have priority up to this part of the limit. The rest is left to new conversations.
SHARED_PART = 7 / 8
# Pinned entries are evicted last, however long they are idle, up to this part of the limit.
PINNED_PART = 1 / 2
_SLACK = 64  # stale items allowed in a queue, besides as many as there are entries


class Evictable:
    """An entry that the budget can evict.

    Attributes:
        nbytes: bytes of its arrays.
        hits: look-ups that it served. It is shared from the first one on: two requests used it.
        pinned: it holds a system prompt of many sessions. Takes effect once it is shared.
        used: the budget's clock at its last use; `seen_at` is the same as seconds since the epoch.
        held: whether the budget counts it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.hits = 0
        self.pinned = False
        self.used = 0.0
        self.seen_at = 0.0
        self.held = False

    @property
    def rank(self) -> int:
        """Return 0 if it was used once, 1 if it is shared, 2 if it is shared and pinned."""
        return 0 if not self.hits else 1 + self.pinned

    def evictable(self) -> bool:
        """Return whether no other entry needs it."""
        return True

    def evict(self) -> None:
        """Release the arrays and call `ByteBudget.remove`."""
        raise NotImplementedError


class _Queue:
    """Evictable entries of one rank, least recently used first. Keeps no reference to a discarded entry."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers = itertools.count()
        # Items go stale: uses only rise, so an item is corrected when it reaches the top. Items identify entries by
        # number, because an item may exist longer than its entry.
        self._heap: list[tuple[float, int]] = []
        self._entries: dict[int, Evictable] = {}
        self._inside: dict[Evictable, int] = {}

    def offer(self, entry: Evictable) -> None:
        if entry not in self._inside:
            number = self._inside[entry] = next(self._numbers)
            self._entries[number] = entry
            heapq.heappush(self._heap, (entry.used, number))

    def discard(self, entry: Evictable) -> None:
        """Remove an entry; no effect if it is absent."""
        number = self._inside.pop(entry, None)
        if number is not None:
            del self._entries[number]
            if len(self._heap) > 2 * len(self._entries) + _SLACK:
                self._heap = [(entry.used, number) for number, entry in self._entries.items()]
                heapq.heapify(self._heap)

    def lowest(self) -> Evictable | None:
        while self._heap:
            used, number = self._heap[0]
            entry = self._entries.get(number)
            if entry is None:
                heapq.heappop(self._heap)
            elif entry.rank != self._rank or not entry.evictable():
                heapq.heappop(self._heap)
                del self._entries[number], self._inside[entry]
            elif entry.used != used:
                heapq.heapreplace(self._heap, (entry.used, number))
            else:
                return entry
        return None


class ByteBudget:
    """A shared limit on bytes. `used` never exceeds `limit`.

    Entries have three ranks, each evicted least recently used first. Entries that served one request go before shared
    ones, unless those have been idle for 64 look-ups or take more than 7/8 of the limit. So a burst of one-off requests
    can't evict a conversation, and old conversations can't keep out new ones. Pinned entries, like an agent's system
    prompt, go last, unless they take more than half of the limit. A new entry evicts only entries that were used before
    the call that stores it, so never the blocks that it continues.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.shared = 0  # part of `used` that was hit
        self.evictions = 0
        self._clock = 0.0
        self._pinned = 0  # part of `used` of rank 2
        self._queues = tuple(_Queue(rank) for rank in range(3))

    def begin_lookup(self) -> None:
        self._clock += _LOOKUP

    def begin_store(self) -> None:
        self._clock += _STORE

    def touch(self, entry: Evictable, hit: bool = False) -> None:
        """Note that the entry is used now."""
        entry.used = self._clock
        entry.seen_at = time.time()
        if hit:
            self._rerank(entry, hits=entry.hits + 1)

    def pin(self, entry: Evictable) -> None:
        """Pin the entry from its first hit on."""
        self._rerank(entry, pinned=True)

    def _rerank(self, entry: Evictable, hits: int | None = None, pinned: bool | None = None) -> None:
        before = entry.rank
        self._count(entry, -1)
        entry.hits = entry.hits if hits is None else hits
        entry.pinned = entry.pinned if pinned is None else pinned
        self._count(entry, 1)
        if entry.rank != before:
            self.offer(entry)

    def _count(self, entry: Evictable, sign: int) -> None:
        if entry.held:
            self.shared += sign * entry.nbytes * (entry.rank > 0)
            self._pinned += sign * entry.nbytes * (entry.rank == 2)

    def reserve(self, nbytes: int) -> bool:
        """Evict until `nbytes` bytes are free; return False if not enough may be evicted."""
        if nbytes > self.limit:
            return False
        while self.used + nbytes > self.limit:
            rank, victim = self._lowest()
            if victim is None or rank >= self._clock:
                return False
            self._evict(victim)
        return True

    def shrink(self, nbytes: int) -> None:
        """Evict `nbytes` bytes, or all entries, in the usual order, to free memory for other uses."""
        goal = self.used - nbytes
        while self.used > goal:
            _, victim = self._lowest()
            if victim is None:
                return
            self._evict(victim)

    def add(self, entry: Evictable) -> None:
        """Count a new entry.

        Raises:
            ValueError: there is no room; call `reserve` first.
        """
        if self.used + entry.nbytes > self.limit:
            raise ValueError(f"{entry.nbytes} bytes do not fit next to {self.used} of {self.limit}")
        self.used += entry.nbytes
        entry.held = True
        self._count(entry, 1)
        self.offer(entry)

    def remove(self, entry: Evictable) -> None:
        """Stop counting an entry; no effect if it isn't counted."""
        if entry.held:
            self._count(entry, -1)
            entry.held = False
            self.used -= entry.nbytes
            for queue in self._queues:
                queue.discard(entry)

    def offer(self, entry: Evictable) -> None:
        """Queue an entry for eviction, if it is evictable now."""
        if entry.held:
            self._queues[entry.rank].offer(entry)

    def _lowest(self) -> tuple[float, Evictable | None]:
        """Return the entry to evict next, with its rank on the clock's scale."""
        grace = GRACE if self.shared <= SHARED_PART * self.limit else 0.0
        graces = (0.0, grace, math.inf if self._pinned <= PINNED_PART * self.limit else grace)
        found = [(queue.lowest(), extra) for queue, extra in zip(self._queues, graces, strict=True)]
        ranked = [(entry.used + extra, entry) for entry, extra in found if entry is not None]
        return min(ranked, key=lambda pair: pair[0], default=(0.0, None))

    def _evict(self, victim: Evictable) -> None:
        victim.evict()
        assert not victim.held
        self.evictions += 1
