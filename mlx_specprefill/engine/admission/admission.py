"""How much memory a request will need, and whether it may start. Plain integers (bytes, tokens)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..stats import Need

__all__ = ["MOST_PAIRS", "Admission", "Footprint", "physical_memory"]

MOST_PAIRS = 2048 * 32768  # query rows times keys of a prefill forward


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one sequence costs in one model, measured at start-up.

    Attributes:
        per_token: bytes of KV cache per stored token.
        constant: bytes per sequence whatever its length (recurrent state, full windows).
        per_row: bytes that a forward needs for each of its tokens.
        per_pair: bytes that it needs for each of its tokens and key: the attention scores, where no kernel spares them.
    """

    per_token: int
    constant: int
    per_row: float = 0.0
    per_pair: float = 0.0

    def of_held(self, tokens: int) -> int:
        """Bytes of a sequence of that many stored tokens, between two forwards."""
        return self.per_token * tokens + self.constant

    def working(self, tokens: int, step: int) -> int:
        """Bytes of the largest forward of a prefill of that many tokens, in forwards of at most `step`."""
        rows = min(step, tokens)
        return round(self.per_row * rows + self.per_pair * min(rows * tokens, MOST_PAIRS))


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
        self._reserved: dict[int, Need] = {}

    @property
    def reserved(self) -> int:
        return sum(need.held for need in tuple(self._reserved.values())) + self.working

    @property
    def working(self) -> int:
        """Of the largest forward that anything in work may need."""
        return max((need.working for need in tuple(self._reserved.values())), default=0)

    def held(self, uid: int) -> int:
        """What is reserved for one, between two forwards."""
        return self._reserved.get(uid, Need()).held

    def can_ever(self, need: Need) -> bool:
        """Whether it fits with nothing else running and an empty prefix cache."""
        return self.limit is None or self.weights + need.total <= self.limit

    def fits(self, need: Need) -> bool:
        """Whether the bytes are free as things stand."""
        return self._missing(need) <= 0 and self._elsewhere(self._more(need)) <= 0

    def reserve(self, uid: int, need: Need) -> bool:
        """Take the bytes if they are free, evicting from the prefix cache first."""
        if (missing := self._missing(need)) > 0:
            self._reclaim(missing)
        if self._elsewhere(more := self._more(need)) > 0:
            self._reclaim_elsewhere(more)
        return self.reserve_free(uid, need)

    def reserve_free(self, uid: int, need: Need) -> bool:
        """Take the bytes if they are free as things stand; nothing is evicted for them."""
        if not self.fits(need):
            return False
        self._reserved[uid] = need
        return True

    def _more(self, need: Need) -> int:
        """What it adds to what is reserved."""
        return need.held + max(0, need.working - self.working)

    def _missing(self, need: Need) -> int:
        if self.limit is None:
            return 0
        return self.weights + self.reserved + self._more(need) + self._cached() - self.limit

    def release(self, uid: int) -> None:
        self._reserved.pop(uid, None)


def physical_memory() -> int | None:
    """Bytes of RAM, None where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
