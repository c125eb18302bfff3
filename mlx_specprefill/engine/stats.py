"""Counters and gauges of the engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["EngineStats", "MemoryUse", "Meter", "Need"]

_WINDOW_S = 5


class Meter:
    """Recent rate of an event per second. Written by one thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, int]] = deque(maxlen=_WINDOW_S + 1)  # (second, count)

    def add(self, count: int) -> None:
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1] = (now, self._seconds[-1][1] + count)
        else:
            self._seconds.append((now, count))

    def per_second(self) -> float:
        """Return the rate over the last whole seconds; 0 if nothing happened."""
        now = int(self._clock())
        return sum(count for second, count in tuple(self._seconds) if now - _WINDOW_S <= second < now) / _WINDOW_S


class Need(NamedTuple):
    """Bytes that a request will need.

    Attributes:
        held: while it runs.
        working: in addition, for its largest forward. Forwards take turns: requests share the largest.
    """

    held: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.held + self.working


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by consumer.

    Attributes:
        target_weights, draft_weights: the models' parameters; shared ones count as the target's.
        requests: KV cache and state of running requests, from the cost per token measured at start.
        reserved: for those requests by admission, answers and activations included.
        prefix_cache: prefixes kept for later requests, in memory.
        prefix_disk: dense prefixes on disk.
        active: all arrays of this process, as MLX counts them.
        spare: freed memory that MLX keeps for new arrays.
        unaccounted_bytes: of `active`, those that are not of weights, caches or requests, measured between two slices
            not more than a second ago. A prefill in work needs some.
        limit: for weights, requests and caches together; None: no limit is known.
    """

    target_weights: int
    draft_weights: int
    requests: int
    reserved: int
    prefix_cache: int
    prefix_disk: int
    active: int
    spare: int
    unaccounted_bytes: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One snapshot. Counts run since the start.

    Attributes:
        waiting, prefilling, decoding: requests now.
        max_rows, max_queue: how many may be in work, and how many may wait.
        fallbacks: sparse prefills that failed and became full ones, by the stage that failed.
        densified, densified_tokens: sparse turns whose prompt was prefilled in full afterwards, in idle time.
        prefix_hits, prefix_misses: requests that found a dense prefix in the target's cache, or none.
        prefix_tokens: prompt tokens that they did not have to prefill.
        tokens_per_second: generated lately, by all requests together.
        evictions: prefixes that memory had no room for; `disk_evictions`: records dropped from disk.
    """

    waiting: int
    prefilling: int
    decoding: int
    max_rows: int
    max_queue: int
    fallbacks: Mapping[str, int]
    densified: int
    densified_tokens: int
    prefix_hits: int
    prefix_misses: int
    prefix_tokens: int
    evictions: int
    disk_evictions: int
    memory: MemoryUse
    tokens_per_second: float = 0.0
