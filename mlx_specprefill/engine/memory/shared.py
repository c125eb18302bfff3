"""One memory limit for all engines: which gives way to another's request, and how much freed memory MLX keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import mlx.core as mx

from .machine import default_limit

_SPARE_PART = 8  # of the limit: what MLX may keep of freed memory, which the limit itself does not count
_PATIENCE_S = 10.0  # for memory that was asked for outside of the engines


class Sharer(Protocol):
    """An engine's `Memory`, as the others see it."""

    parameters: Mapping[int, int]
    pinned: bool
    last_use: float
    stop_background: Callable[[], None]

    @property
    def reserved(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def reclaimable(self) -> int: ...
    def evict(self, nbytes: int) -> None: ...


class SharedMemory:
    """Memory budget of all engines on a thread. MLX thread only, except `limit`.

    Args:
        limit: for everything together; None: what the device recommends.

    Attributes:
        on_pressure: called with the bytes that no engine can free by itself; None: no further source.
        loading: bytes of models that are being loaded.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit or default_limit()
        self.on_pressure: Callable[[int], None] | None = None
        self.loading = 0
        self._sharers: list[Sharer] = []
        self._spare_before: int | None = None  # MLX's own limit
        self._waiting_since: dict[tuple[Sharer, int], float] = {}  # when, by the monotonic clock; for which request

    def join(self, sharer: Sharer) -> None:
        """Add an engine whose models are loaded. Their bytes no longer count as loading."""
        self.loading = max(0, self.loading - sum(sharer.parameters.values()))
        if not self._sharers and self.limit is not None:
            self._spare_before = mx.set_cache_limit(self.limit // _SPARE_PART)
            if self._spare_before < self.limit // _SPARE_PART:  # a limit that is lower already stays
                mx.set_cache_limit(self._spare_before)
        self._sharers.append(sharer)

    def leave(self, sharer: Sharer) -> None:
        """Remove an engine. The last one restores MLX's settings."""
        if sharer not in self._sharers:
            return
        self._sharers.remove(sharer)
        if not self._sharers and self._spare_before is not None:
            mx.set_cache_limit(self._spare_before)

    def free(self) -> int | None:
        """Return the bytes left beside models (loaded or loading) and running requests; None without a limit.

        Cached prefixes count as free. May be called from any thread.
        """
        if self.limit is None:
            return None
        return self.limit - self.weights() - sum(one.reserved for one in tuple(self._sharers)) - self.loading

    def weights(self, pinned: bool = False, beside: Mapping[int, int] | None = None) -> int:
        """Return the bytes of all models, each array counted once.

        Args:
            pinned: of pinned models only.
            beside: further arrays to count.
        """
        arrays = dict(beside or {})
        for sharer in tuple(self._sharers):
            if sharer.pinned or not pinned:
                arrays.update(sharer.parameters)
        return sum(arrays.values())

    def room(self, sharer: Sharer) -> int | None:
        """Return the bytes that an engine could use for requests if only pinned models were loaded; None: no limit."""
        return None if self.limit is None else self.limit - self.weights(pinned=True, beside=sharer.parameters)

    def missing(self, need: int) -> int:
        """Return the bytes of `need` that are not free now. Limits of single engines are not considered."""
        if self.limit is None or not (self.loading or len(self._sharers) > 1):
            return 0
        return self.taken() + need - self.limit

    def taken(self) -> int:
        """Return the bytes of all models (loaded or loading), requests and cached prefixes."""
        return self.weights() + sum(one.reserved + one.cached for one in self._sharers) + self.loading

    def reclaim(self, need: int, sharer: Sharer | None = None) -> None:
        """Free memory from caches: background work first, then the least recently used engine's cache.

        Args:
            sharer: the engine that needs the memory; its own cache is freed last.
        """
        for one in self._others(sharer):
            one.stop_background()
        for one in (*self._others(sharer), *([] if sharer is None else [sharer])):
            if (missing := self.missing(need)) <= 0:
                return
            one.evict(missing)

    def can_reclaim(self, need: int, sharer: Sharer) -> bool:
        """Return whether `reclaim` would free enough."""
        others = sum(one.reclaimable for one in self._others(sharer))
        return self.missing(need) <= others + sharer.cached

    def room_for_prefixes(self, sharer: Sharer) -> float:
        """Return the bytes that an engine's cache may have beside all that the others hold now."""
        if self.limit is None or not (self.loading or len(self._sharers) > 1):
            return math.inf
        return sharer.cached - self.missing(0)

    def can_be_freed(self, need: int, sharer: Sharer, uid: int) -> bool:
        """Return whether missing memory may become free soon: other requests end, or `on_pressure` was called.

        Args:
            uid: of the request. It is called once for each, and given ten seconds.
        """
        if any(one.reserved for one in self._others(sharer)):
            return True
        if self.on_pressure is None or self.missing(need) <= 0:
            return False
        if (sharer, uid) not in self._waiting_since:
            self._waiting_since[sharer, uid] = time.monotonic()
            self.on_pressure(need)
        return time.monotonic() - self._waiting_since[sharer, uid] < _PATIENCE_S

    def forget(self, sharer: Sharer, uid: int) -> None:
        """Forget that memory was asked for: the request has it, or has ended."""
        self._waiting_since.pop((sharer, uid), None)

    def _others(self, sharer: Sharer | None) -> Iterable[Sharer]:
        return sorted((one for one in self._sharers if one is not sharer), key=lambda one: one.last_use)
