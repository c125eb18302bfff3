"""Leaks: bytes that MLX holds and that no model, cache or request answers for. Logged as they grow."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)
TOLERATED = 32 << 20  # bytes that need no owner: tables, masks, logits, rounding in MLX
_AGAIN = 2  # factor of growth since the last warning that causes the next one


class LeakDetector:
    """Compares the bytes that MLX holds with those of weights, caches and requests.

    Attributes:
        unaccounted: bytes, at the last check.
    """

    def __init__(self) -> None:
        self.unaccounted = 0
        self._told = 0

    def check(self, active: int, held: Mapping[str, int], working_set: int = 0) -> None:
        """Compare between two steps. Log a surplus once, and again after it has doubled.

        Args:
            active: bytes of all arrays, as MLX counts them.
            held: bytes by consumer.
            working_set: bytes that a prefill in work may need beside its cache.
        """
        self.unaccounted = max(0, active - sum(held.values()))
        if self.unaccounted <= max(TOLERATED + working_set, _AGAIN * self._told):
            return
        self._told = self.unaccounted
        log.warning(
            "MLX holds %d MiB that nothing answers for, of %d MiB: %s. If that grows, memory leaks: please report it",
            self.unaccounted >> 20,
            active >> 20,
            ", ".join(f"{name} {nbytes >> 20} MiB" for name, nbytes in held.items()),
        )
