"""Predicts the memory of requests, shares one limit among all engines of a thread, and finds leaks. In bytes."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..cache.positioned import leaves
from ..config import EngineConfig
from ..errors import SettingsError
from ..loading import ModelPair
from ..request import GenerationRequest, Mode
from .caches import EngineCaches
from .footprint import (
    Admission,
    Footprint,
    default_limit,
    hidden_bytes,
    measure_footprint,
    measure_head_footprint,
    weight_bytes,
    weights_by_array,
)
from .sequence import Job, Need, Sequence
from .speculation import AnswerDrafter

log = logging.getLogger(__name__)
TOLERATED = 32 << 20  # bytes that need no owner: tables, masks, logits, rounding in MLX
_AGAIN = 2  # factor of growth since the last warning that causes the next one


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
        unaccounted_bytes: of `active`, those that are not of weights, caches or requests, measured between two steps
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


class LeakDetector:
    """Compares the bytes that MLX holds with those of weights, caches and requests.

    Attributes:
        unaccounted: bytes, when it was last balanced.
    """

    def __init__(self) -> None:
        self.unaccounted = 0
        self._told = 0

    def balance(self, active: int, held: Mapping[str, int], working_set: int = 0) -> None:
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


def cache_bytes(cache: Seq[Any]) -> int:
    """Return the bytes of a prompt cache's arrays with their room to grow. Layers that report no size count as 0."""
    total = 0
    for part in leaves(cache):
        try:
            total += int(part.nbytes)
        except NotImplementedError:
            continue
    return total


_SPARE_PART = 8  # of the limit: what MLX may keep of freed memory, which the limit itself does not count
_PATIENCE_S = 10.0  # for memory that was asked for outside of the engines


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
        self._sharers: list[Memory] = []
        self._spare_before: int | None = None  # MLX's own limit
        self._asked: dict[Memory, float] = {}  # when, by the monotonic clock

    def join(self, sharer: Memory) -> None:
        """Add an engine whose models are loaded. Their bytes no longer count as loading."""
        self.loading = max(0, self.loading - sum(sharer.parameters.values()))
        if not self._sharers and self.limit is not None:
            self._limit_spare(self.limit // _SPARE_PART)
        self._sharers.append(sharer)

    def leave(self, sharer: Memory) -> None:
        """Remove an engine. The last one restores MLX's settings."""
        if sharer not in self._sharers:
            return
        self._sharers.remove(sharer)
        self._asked.pop(sharer, None)
        if not self._sharers and self._spare_before is not None:
            mx.set_cache_limit(self._spare_before)

    def _limit_spare(self, nbytes: int) -> None:
        """Lower MLX's limit for freed memory. A limit that is lower already stays."""
        self._spare_before = mx.set_cache_limit(nbytes)
        if self._spare_before < nbytes:
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

    def others(self, sharer: Memory) -> int:
        """Return the measured bytes of the other engines' models, requests and caches."""
        own = sum(sharer.parameters.values())
        return (
            self.weights(beside=sharer.parameters) - own + sum(one.held for one in self._others(sharer)) + self.loading
        )

    def room(self, sharer: Memory) -> int | None:
        """Return the bytes that an engine could use for requests if only pinned models were loaded; None: no limit."""
        return None if self.limit is None else self.limit - self.weights(pinned=True, beside=sharer.parameters)

    def missing(self, need: int) -> int:
        """Return the bytes of `need` that are not free now. Limits of single engines are not considered."""
        if self.limit is None or not (self.loading or len(self._sharers) > 1):
            return 0
        return self.weights() + self._taken_bytes() + self.loading + need - self.limit

    def _taken_bytes(self) -> int:
        return sum(one.reserved + one.cached for one in self._sharers)

    def reclaim(self, need: int, sharer: Memory | None = None) -> None:
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

    def may_come(self, need: int, sharer: Memory) -> bool:
        """Return whether missing memory may become free soon: other requests end, or `on_pressure` was called."""
        if any(one.reserved for one in self._others(sharer)):
            return True
        if self.on_pressure is None or self.missing(need) <= 0:
            return False
        if sharer not in self._asked:
            self._asked[sharer] = time.monotonic()
            self.on_pressure(need)
        return time.monotonic() - self._asked[sharer] < _PATIENCE_S

    def came(self, sharer: Memory) -> None:
        """Note that the engine's request for memory was met."""
        self._asked.pop(sharer, None)

    def _others(self, sharer: Memory | None) -> Iterable[Memory]:
        return sorted((one for one in self._sharers if one is not sharer), key=lambda one: one.last_use)


_ANSWER_TOKENS = 2048  # of the answer that admission counts: clients ask for the whole context and use little of it


class Memory:
    """Predicts and reports; before `measure` everything is free.

    Attributes:
        admission: which predictions fit, and what is reserved for which job.
        parameters: bytes of each array of its models, by identity: two engines can share a draft.
        pinned: its models are never unloaded.
        last_use: when it last let a request in, by the monotonic clock.
        common: the budget that all engines of the thread share.
    """

    def __init__(
        self,
        pair: ModelPair,
        config: EngineConfig,
        caches: EngineCaches,
        common: SharedMemory | None = None,
        pinned: bool = False,
    ) -> None:
        self._pair = pair
        self._config = config
        self._caches = caches
        self._target = self._draft = self._head = Footprint(0, 0)
        self._weights = (0, 0)  # bytes of target and draft
        self._window: int | None = None  # of the rank with the least room, if that is another rank
        self._hidden_bytes = 0  # per token, passed on by the target's first layers
        self._ledger = LeakDetector()
        self._jobs: Callable[[], Collection[Job]] = tuple
        self._rows: Callable[[], int] = int
        self._stop_background: Callable[[], None] = lambda: None
        self.common = common or SharedMemory(config.memory_limit)
        self.pinned = pinned
        self.last_use = 0.0
        self.parameters: Mapping[int, int] = {}
        self.admission = Admission(None, 0)

    def watch(
        self, jobs: Callable[[], Collection[Job]], rows: Callable[[], int], stop_background: Callable[[], None]
    ) -> None:
        """Set where requests' memory is read from, and how to end background work.

        Args:
            rows: bytes of the caches of all decoding rows.
        """
        self._jobs, self._rows, self._stop_background = jobs, rows, stop_background

    def measure(self) -> None:
        """Measure the memory of a sequence on the MLX thread. If this fails, the first request reports the error."""
        pair, limit = self._pair, self._config.memory_limit or self.common.limit
        self._weights, self.parameters = _weights(pair), weights_by_array(pair.target, pair.draft)
        self.common.join(self)
        try:
            self._target = measure_footprint(pair.target, pair.context_length)
            self._draft = measure_footprint(pair.draft, pair.draft_context)
            self._head = measure_head_footprint(pair.mtp)
            self._hidden_bytes = 0 if pair.stages is None else hidden_bytes(pair.stages)
        except Exception as error:  # noqa: BLE001 - the first request reports the error
            self._go_without(error)
            limit = None
        self.admission = Admission(
            limit,
            sum(self._weights),
            lambda: self._caches.nbytes,
            self._caches.reclaim,
            self.common.missing,
            lambda need: self.common.reclaim(need, self),
        )
        if (window := self.window()) < pair.context_length:
            log.warning(
                "memory leaves room for %d tokens of prompt and answer, of the model's %d; --memory-limit allows more",
                window,
                pair.context_length,
            )

    def _go_without(self, error: Exception) -> None:
        log.error("could not measure memory use: requests are admitted without a prediction", exc_info=error)

    def close(self) -> None:
        """Return the engine's part of the shared budget, and freed memory to the system. MLX thread only."""
        self.common.leave(self)
        mx.clear_cache()

    @property
    def reserved(self) -> int:
        return self.admission.reserved

    @property
    def cached(self) -> int:
        return self._caches.nbytes

    @property
    def held(self) -> int:
        """Return the measured bytes of caches and requests."""
        return self._caches.nbytes + self._rows() + sum(self._arrays(job) for job in self._jobs())

    def stop_background(self) -> None:
        """End background work."""
        self._stop_background()

    def evict(self, nbytes: int) -> None:
        """Evict at least `nbytes` cached bytes, or all of them."""
        self._caches.reclaim(nbytes)

    def reserve(self, uid: int, need: Need) -> bool:
        """Reserve the bytes for a request, evicting from caches if necessary."""
        if not self.admission.reserve(uid, need):
            return False
        self.last_use = time.monotonic()
        self.common.came(self)
        return True

    def fits(self, need: Need) -> bool:
        """Return whether the bytes are free now."""
        return self.admission.fits(need)

    def reserve_free(self, uid: int, need: Need) -> bool:
        """Reserve the bytes if they are free now. Evicts nothing."""
        return self.admission.reserve_free(uid, need)

    def may_come(self, need: int) -> bool:
        """Return whether memory that other engines hold may become free for it."""
        return self.common.may_come(need, self)

    def can_ever(self, need: Need) -> bool:
        """Return whether it fits with no other job, empty caches, and every unpinned model unloaded."""
        room = self.common.room(self)
        return self.admission.can_ever(need) and (room is None or self.admission.limit is None or need.total <= room)

    def lower_limit(self) -> None:
        """Lower the limit after an out-of-memory error, to four fifths of the memory beside the weights."""
        limit = self.admission.limit
        if limit is None:
            return
        less = (limit - self.admission.weights) // 5
        self.admission.limit = limit - less
        if self.common.limit is not None:
            self.common.limit -= less
        log.warning("the memory limit is %d MiB from now on", self.admission.limit >> 20)

    def has_room(self, request: GenerationRequest) -> bool:
        """Return whether the rank with the least memory can prefill the prompt in full, and answer."""
        tokens = len(request.prompt) + min(request.max_tokens, _ANSWER_TOKENS)
        return self._window is None or tokens <= self._window

    def need(self, request: GenerationRequest, mode: Mode) -> Need:
        """Predict the need: prompt and answer in the target and its MTP head, the prompt in the draft."""
        tokens = len(request.prompt) + min(request.max_tokens, _ANSWER_TOKENS)
        parts = self._answering(tokens, request.specprefill.speculative)
        if mode == "sparse" and self._hidden_bytes:  # the caches of the first layers are the target's
            held, working = self._need(*parts)
            return Need(held + self._hidden_bytes * len(request.prompt), working)
        if mode == "sparse":
            parts.append((self._draft, round(len(request.prompt) * self._pair.draft_ratio)))
        return self._need(*parts)

    def _answering(self, tokens: int, strategy: str | None) -> list[tuple[Footprint, int]]:
        """Return the footprints that hold `tokens` tokens of prompt and answer, and the token count of each."""
        return [(self._target, tokens), *([(self._head, tokens)] if self._has_head(strategy) else [])]

    def _need(self, *parts: tuple[Footprint, int]) -> Need:
        """Return the need of sequences that are prefilled one after the other."""
        step = self._config.prefill_step
        return Need(
            sum(part.of_held(tokens) for part, tokens in parts),
            max(part.working(tokens, step) for part, tokens in parts),
        )

    def window(self, strategy: str | None = None) -> int:
        """Return the tokens of prompt and answer that one request may have: the model's limit, or that of memory.

        Args:
            strategy: the answer's drafting strategy, if it is not the configured one.
        """
        if self.admission.limit is None:
            return self._pair.context_length
        free = self.admission.limit - self.admission.weights
        if (room := self.common.room(self)) is not None:
            free = min(free, room)
        most = self._pair.context_length if self._window is None else self._window
        lengths = range(1, most + 1)
        return bisect_right(lengths, free, key=lambda tokens: self._need(*self._answering(tokens, strategy)).total)

    def _has_head(self, strategy: str | None) -> bool:
        return (strategy or self._config.speculation.strategy) == "mtp"

    def need_idle(self, tokens: int, dense: bool) -> Need:
        """Predict the need of prefilling `tokens` tokens in idle time, by the target if `dense`, else the draft."""
        return self._need((self._target if dense else self._draft, tokens))

    def use(self, jobs: Iterable[Job]) -> MemoryUse:
        """Return the memory in use, by consumer. May be called from any thread."""
        return MemoryUse(
            target_weights=self._weights[0],
            draft_weights=self._weights[1],
            requests=sum(self._cache_bytes(job) for job in jobs),
            reserved=self.admission.reserved,
            prefix_cache=self._caches.nbytes,
            prefix_disk=self._caches.disk_nbytes,
            active=mx.get_active_memory(),
            spare=mx.get_cache_memory(),
            unaccounted_bytes=self._ledger.unaccounted,
            limit=self.admission.limit,
        )

    def balance(self, jobs: Collection[Job], rows: int) -> None:
        """Compare MLX's memory with the memory accounted for, between two steps on the MLX thread.

        Args:
            rows: bytes of the caches of all decoding rows.
        """
        held = {
            "weights": sum(self._weights),
            "prefixes": self._caches.nbytes,
            "requests": rows + sum(self._arrays(job) for job in jobs),
            "other models": self.common.others(self),
        }
        self._ledger.balance(mx.get_active_memory(), held, self.admission.working)

    def return_spare(self) -> None:
        """Return MLX's freed memory to the system. MLX thread only."""
        mx.clear_cache()

    def _arrays(self, job: Job) -> int:
        """Return the bytes of a job's caches, except a decoding row's. A cache of unknown size counts as predicted."""
        sequence = job.sequence
        if sequence is None:
            read = self._draft.of_held(job.done.get("draft", 0)) + self._target.of_held(job.done.get("prefill", 0))
            return max(read, self.admission.held(job.uid))
        drafting = sequence.drafting
        drafts = drafting is not None and drafting.cache is not None
        total = cache_bytes(sequence.cache)
        if sequence.hidden is not None:
            total += sequence.hidden.nbytes
        if sequence.stage == "draft" and not drafts:
            total += self._draft.of_held(job.done.get("draft", 0))
        return total if drafting is None else total + self._drafting(sequence, drafting)

    def _drafting(self, sequence: Sequence, drafting: AnswerDrafter) -> int:
        """Return the bytes of an answer's proposer."""
        total = cache_bytes(drafting.cache or ())
        if drafting.reader is not None:
            total += self._head.per_token * (len(sequence.request.prompt) + len(sequence.tokens))
        if drafting.strategy == "triforce":
            total += self._target.per_token * self._config.speculation.budget
        return total

    def _cache_bytes(self, job: Job) -> int:
        """Return the bytes of the request's target cache so far."""
        sequence = job.sequence
        if sequence is None or sequence.stage == "queued":
            return 0
        stored = sequence.cached + job.done.get("prefill", 0)
        if sequence.stage == "decode":
            read = len(sequence.request.prompt) if sequence.kept is None else int(sequence.kept.size)
            stored = read + len(sequence.tokens)
            if sequence.staged:
                return self._target.of_held(stored) + self._draft.per_token * (len(sequence.request.prompt) - read)
        return self._target.of_held(stored)


def _weights(pair: ModelPair) -> tuple[int, int]:
    """Return the bytes of the target with its MTP head, and of the draft."""
    head = 0 if isinstance(pair.mtp, str) else pair.mtp.nbytes
    return weight_bytes(pair.target) + head, weight_bytes(pair.draft, pair.target) if pair.draft else 0


def check_limit(pair: ModelPair, config: EngineConfig) -> None:
    """Check that the configured limit has room for the weights.

    Raises:
        SettingsError: it has not.
    """
    limit, weights = config.memory_limit, _weights(pair)
    if limit is not None and limit <= sum(weights):
        target, draft = (f"{nbytes / 2**20:.1f} MiB" for nbytes in weights)
        raise SettingsError(
            f"--memory-limit of {limit / 2**20:.1f} MiB is below the weights: target {target}, draft {draft}. At least "
            f"{sum(weights) / 2**20:.1f} MiB are needed, and more for requests and caches"
        )
