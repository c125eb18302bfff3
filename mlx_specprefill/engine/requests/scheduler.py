"""Decides whose turn it is: which request is admitted next, and which prefill gets the next chunk.

One step of the engine is one decode step of all running requests, then prefill chunks. The prefill with the fewest
tokens left goes first, in admission and for each chunk, so a short prompt is never stuck behind a long one. Ageing
keeps the long ones going: the oldest prefill gets a fifth of the time, and the request that has waited longest every
fourth place. A quarter of the places is kept for short prompts. Background work runs when there is no request.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

PATIENCE = 4  # times `target_itl_ms` that others may have before the oldest prefill gets a chunk
_SHORT = 256  # tokens; or half as many as the median request
_SHORT_PLACES = 4  # one place in this many is kept for short prompts
_EVERY = 4  # one in this many admissions goes to the request that has waited longest
_OTHERS = 4  # milliseconds for other prefills per millisecond of the oldest one
_PASSES = 64  # admissions of others after which it is next, even if memory has to become free first


@dataclass
class _Prefill:
    uid: int
    left: int  # known tokens to read
    is_short: bool


class Scheduler:
    """Waiting, prefilling and decoding requests by uid. Integers only: no arrays, clocks, threads.

    Args:
        max_rows: requests that may hold a cache at once, prefilling or decoding.
        patience: milliseconds that others may have before the oldest prefill gets a chunk.
    """

    def __init__(self, max_rows: int = 32, patience: int = 800) -> None:
        self.max_rows = max_rows
        self.patience = patience
        self._kept = max_rows // _SHORT_PLACES
        self._waiting: dict[int, int] = {}  # tokens left, in order of arrival
        self._behind: dict[int, int] = {}  # of those, the prefill that each waits for
        self._prefilling: dict[int, _Prefill] = {}  # in order of admission
        self._decoding: dict[int, bool] = {}  # by uid, whether its prompt was short
        self._background: list[int] = []
        self._passed = 0  # admissions of others since the first request in line that is free is first
        self._waited = 0  # milliseconds of others, less those that the oldest prefill's own chunks allow

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of admitted requests. May be called from any thread."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def prefilling(self) -> tuple[int, ...]:
        """Return the admitted requests whose prompts are being read, in order of admission."""
        return tuple(self._prefilling)

    @property
    def decoding(self) -> frozenset[int]:
        return frozenset(self._decoding)

    @property
    def is_contended(self) -> bool:
        """Return whether another request waits for a chunk to end. May be called from any thread."""
        return bool(self._decoding) or self.running + self.waiting > 1

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._background)

    def add(self, uid: int, left: int = 1 << 30) -> None:
        """Queue a request with `left` known tokens to read, or correct these tokens of a waiting one."""
        self._waiting[uid] = left

    def add_background(self, uid: int) -> None:
        """Add a job that yields to every request. It needs no admission."""
        self._background.append(uid)

    def hold(self, uid: int, other: int) -> None:
        """Let a waiting request wait until the prefill of another has ended."""
        self._behind[uid] = other

    def next_waiting(self, passing: bool = False) -> int | None:
        """Return the request to admit next; None where there is none, or no place for it.

        Args:
            passing: the request that was returned last does not fit in memory. Return a shorter one that may pass it.
        """
        free = self._free
        if not free or self.running >= self.max_rows:
            return None
        first, shortest = free[0], min(free, key=lambda uid: self._waiting[uid])
        if passing:
            return shortest if shortest != first and self._passed < _PASSES and self._is_short(shortest) else None
        short = sum(self._decoding.values()) + sum(job.is_short for job in self._prefilling.values())
        on_kept_places = min(self._kept, short)
        if self.running - on_kept_places >= self.max_rows - self._kept:
            return shortest if self._is_short(shortest) else None
        return first if self._passed >= _PASSES or self._passed % _EVERY == _EVERY - 1 else shortest

    @property
    def _free(self) -> list[int]:
        """Return the waiting requests that no prefill holds back, in order of arrival."""
        return [uid for uid in self._waiting if self._behind.get(uid) not in self._prefilling]

    def _is_short(self, uid: int) -> bool:
        left = [*self._waiting.values(), *(job.left for job in self._prefilling.values())]
        return self._waiting[uid] <= max(_SHORT, statistics.median_low(left) // 2)

    def admit(self, uid: int) -> None:
        """Let a waiting request start its prefill."""
        self._passed = 0 if self._free[:1] == [uid] else self._passed + 1
        # Before the removal: other threads read `waiting`, then `running`, and must find the request in one.
        self._prefilling[uid] = _Prefill(uid, self._waiting[uid], self._is_short(uid))
        del self._waiting[uid]
        self._behind.pop(uid, None)

    def pick(self) -> int | None:
        """Return the prefill that gets the next chunk."""
        if not self._prefilling:
            return None if self._decoding or self._waiting else next(iter(self._background), None)
        oldest, shortest = next(iter(self._prefilling)), min(self._prefilling.values(), key=lambda job: job.left)
        return oldest if self._waited >= self.patience and shortest.left > 0 else shortest.uid

    def record(self, uid: int, left: int | None, ms: int) -> None:
        """Record the milliseconds of the chunk that `pick` chose, and the prompt's tokens left, if known."""
        job = self._prefilling.get(uid)
        if job is None:
            return
        if left is not None:
            job.left = left
        if uid == next(iter(self._prefilling)):
            self._waited = max(0, self._waited - _OTHERS * ms)
        else:  # at most the credit of one chunk, so that two in a row never delay a short prompt
            self._waited = min(self._waited + ms, self.patience)

    def to_decode(self, uid: int) -> None:
        self._decoding[uid] = self._prefilling[uid].is_short
        del self._prefilling[uid]

    def remove(self, uid: int) -> None:
        """Remove a request in any state."""
        self._waiting.pop(uid, None)
        self._behind.pop(uid, None)
        self._prefilling.pop(uid, None)
        self._decoding.pop(uid, None)
        self._background = [other for other in self._background if other != uid]
