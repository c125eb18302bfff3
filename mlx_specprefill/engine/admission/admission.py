"""How much memory a request will need, and whether it may start. Plain integers (bytes, tokens)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Admission", "Footprint", "physical_memory"]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one sequence costs in one model, measured at start-up.

    Attributes:
        per_token: bytes of KV cache per stored token.
        constant: bytes per sequence whatever its length (recurrent state, full windows).
        activation: peak bytes of one prefill forward of full size.
    """

    per_token: int
    constant: int
    activation: int

    def of(self, tokens: int) -> int:
        """Bytes at the peak of a sequence of that many stored tokens."""
        return self.of_held(tokens) + self.activation

    def of_held(self, tokens: int) -> int:
        """Bytes of a sequence of that many stored tokens, between two forwards."""
        return self.per_token * tokens + self.constant


class Admission:
    """Reservations against a limit that also holds the weights and the prefix cache.

    Args:
        limit: bytes for everything; None switches admission control off.
        weights: bytes that are always taken.
        cached: bytes held by the prefix cache right now.
        reclaim: frees at least that many bytes of the prefix cache if it can.
        elsewhere: how much of so many bytes is missing because of other engines; `reclaim_elsewhere` frees it if
            it can.
    """

    def __init__(
        self,
        limit: int | None,
        weights: int,
        cached: Callable[[], int] = lambda: 0,
        reclaim: Callable[[int], None] = lambda _: None,
        elsewhere: Callable[[int], int] = lambda _: 0,
        reclaim_elsewhere: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.limit = limit
        self.weights = weights
        self._cached = cached
        self._reclaim = reclaim
        self._elsewhere = elsewhere
        self._reclaim_elsewhere = reclaim_elsewhere
        self._reserved: dict[int, int] = {}

    @property
    def reserved(self) -> int:
        return sum(self._reserved.values())

    def of(self, uid: int) -> int:
        """What is reserved for one."""
        return self._reserved.get(uid, 0)

    def can_ever(self, need: int) -> bool:
        """Whether it fits with nothing else running and an empty prefix cache."""
        return self.limit is None or self.weights + need <= self.limit

    def fits(self, need: int) -> bool:
        """Whether the bytes are free as things stand."""
        return self._missing(need) <= 0 and self._elsewhere(need) <= 0

    def reserve(self, uid: int, need: int) -> bool:
        """Take the bytes if they are free, evicting from the prefix cache first."""
        if (missing := self._missing(need)) > 0:
            self._reclaim(missing)
        if self._elsewhere(need) > 0:
            self._reclaim_elsewhere(need)
        return self.reserve_free(uid, need)

    def reserve_free(self, uid: int, need: int) -> bool:
        """Take the bytes if they are free as things stand; nothing is evicted for them."""
        if not self.fits(need):
            return False
        self._reserved[uid] = need
        return True

    def _missing(self, need: int) -> int:
        if self.limit is None:
            return 0
        return self.weights + self.reserved + need + self._cached() - self.limit

    def release(self, uid: int) -> None:
        self._reserved.pop(uid, None)


def physical_memory() -> int | None:
    """Bytes of RAM, None where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
