"""Leaks: bytes that MLX holds and that no model, cache or request answers for. Logged when they grow and grow."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from importlib.metadata import version

log = logging.getLogger(__name__)
TOLERATED = 32 << 20  # bytes that need no owner: tables, masks, logits, rounding in MLX; less is no change
_TIMES = 3  # of growth in a row: once is whatever else the process holds


class LeakDetector:
    """Compares the bytes that MLX holds with those of weights, caches and requests.

    A step of a request may hold more for a while, and other code of the process may hold arrays for good. What leaks
    grows with requests: so the lowest surplus between two ends of requests counts.

    Attributes:
        unaccounted: bytes, at the last check.
    """

    def __init__(self) -> None:
        self.unaccounted = 0
        self._lowest: float = math.inf  # since the last end of a request
        self._ended = 0
        self._grown: list[tuple[int, int]] = [(0, 0)]  # (requests that had ended, bytes), each above the one before

    def check(self, active: int, held: Mapping[str, int], ended: int, working_set: int = 0) -> None:
        """Compare between two steps. Log a surplus that has grown three times in a row, each time behind a request.

        Args:
            active: bytes of all arrays, as MLX counts them.
            held: bytes by consumer.
            ended: requests so far.
            working_set: bytes that a prefill in work may need beside its cache.
        """
        self.unaccounted = max(0, active - sum(held.values()))
        self._lowest = min(self._lowest, max(0, self.unaccounted - working_set))
        if ended == self._ended:
            return
        lowest, self._lowest, self._ended = int(self._lowest), math.inf, ended
        before = self._grown[-1][1]
        if lowest < before - TOLERATED:
            self._grown = [(ended, lowest)]
        elif lowest > before + TOLERATED:
            self._grown.append((ended, lowest))
        if len(self._grown) > _TIMES:
            self._tell(active, held)
            self._grown = self._grown[-1:]

    def _tell(self, active: int, held: Mapping[str, int]) -> None:
        log.warning(
            "MLX holds memory that nothing answers for, and it grew three times in a row: %s. MLX %s holds %d MiB in "
            "all: %s. If it goes on, memory leaks: please report this line and what the requests were",
            ", ".join(f"{nbytes >> 20} MiB after {ended} requests" for ended, nbytes in self._grown),
            version("mlx"),
            active >> 20,
            ", ".join(f"{name} {nbytes >> 20} MiB" for name, nbytes in held.items()),
        )
