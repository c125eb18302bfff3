"""Measures and predicts memory, shares one limit among all engines of a thread, and finds leaks. In bytes."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes as classes_of

from ..adapters.depth import full_draft_model
from ..adapters.mtp import MTPHead
from ..adapters.patches import install_patches
from ..adapters.rope_names import with_old_rope_names
from ..adapters.staged import StagedModel
from ..cache.positioned import fill, leaves
from ..config import EngineConfig
from ..errors import SettingsError
from ..loading import ModelPair
from ..reading import context_length
from ..request import GenerationRequest, Mode
from ..sampling import LOGITS_ROWS
from ..specprefill.sparse_prefill import TAIL
from ..speculative.strategies import STRATEGIES, refusal
from .caches import EngineCaches
from .machine import default_limit
from .sequence import AnswerJob, Job, Need, Sequence
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
        reserved: for those requests, answers and activations included.
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


_SHORT = 128  # tokens of the first measuring forward
_FAR, _DEPTH = 32, 2048  # tokens of the second one, and cached tokens before them
# Queries times keys of one prefill forward. A larger forward may exceed the time that a GPU's watchdog allows.
MOST_PAIRS = 2048 * 32768


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one sequence in one model, measured at start-up.

    Attributes:
        per_token: bytes of KV cache per stored token.
        constant: bytes per sequence whatever its length (recurrent state, full windows).
        per_row: bytes that a forward needs for each of its tokens.
        per_pair: bytes that it needs per token and key, for attention scores that no fused kernel avoids.
    """

    per_token: int
    constant: int
    per_row: float = 0.0
    per_pair: float = 0.0

    def of_held(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` stored tokens, between two forwards."""
        return self.per_token * tokens + self.constant

    def working(self, tokens: int, step: int) -> int:
        """Return the bytes of the largest forward when `tokens` tokens are prefilled in forwards of at most `step`."""
        rows = min(step, tokens)
        return round(self.per_row * rows + self.per_pair * min(rows * tokens, MOST_PAIRS))


def weight_bytes(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Return the bytes of the loaded parameters that `beside` does not share: a draft can be a part of its target."""
    return sum(weights_by_array(model, beside).values()) - sum(weights_by_array(beside).values())


def weights_by_array(*models: nn.Module | None) -> dict[int, int]:
    """Return the bytes of these models' arrays by identity, including layers that a draft does not run."""
    parts = [part for model in models for part in (model, getattr(model, "whole", None)) if part is not None]
    return {id(array): int(array.nbytes) for part in parts for _, array in tree_flatten(part.parameters())}


def measure_footprint(model: nn.Module | None, context: int | None = None) -> Footprint:
    """Measure the cache's arrays, and the allocator's peak in two short forwards: at the start, and behind many tokens.

    The additional memory per token of the second forward is that of the attention scores. It depends on the device, the
    heads' size and MLX. Windows stay empty: full attention needs more than they do.

    Args:
        context: positions that the model supports; None: as many as are measured.
    """
    if model is None:
        return Footprint(0, 0)
    cache = list(make_prompt_cache(model))
    _peak(model, cache, 2)  # makes the cache's arrays, with room for the next forward
    per_row = _peak(model, cache, _SHORT) / _SHORT
    depth = min(_DEPTH, (context or _DEPTH + _FAR) - _FAR)
    if depth <= 2 * _SHORT:
        return replace(cache_footprint(cache), per_row=per_row)
    fill(cache, depth)
    more = max(0.0, _peak(model, cache, _FAR) / _FAR - per_row)
    per_pair = more / (depth + _FAR - _SHORT)
    return replace(cache_footprint(cache), per_row=max(0.0, per_row - per_pair * _SHORT), per_pair=per_pair)


def _peak(model: nn.Module, cache: list[Any], tokens: int) -> int:
    """Return the peak bytes of a forward of `tokens` tokens, above those in use before."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    mx.eval([part.state for part in cache])
    return int(mx.get_peak_memory()) - before


def cache_footprint(cache: list[Any]) -> Footprint:
    """Return the footprint of a filled cache. Reads no array."""
    per_token = constant = 0
    for part in leaves(cache):
        if isinstance(part, ArraysCache):
            constant += int(part.nbytes)
        elif isinstance(part, RotatingKVCache):
            constant += _bytes_per_token(part) * int(part.max_size)
        elif getattr(part, "keys", None) is not None:
            per_token += _bytes_per_token(part)
    return Footprint(per_token, constant)


def hidden_bytes(model: StagedModel) -> int:
    """Return the bytes per token that the first layers pass on. Computes nothing."""
    return int(model.lower(mx.zeros((1, 1), dtype=mx.int32), cache=model.lower.make_cache()).nbytes)


def measure_head_footprint(head: MTPHead | str) -> Footprint:
    """Measure the cache entries of an MTP head. Computes a few at a time, beside larger forwards."""
    if isinstance(head, str):
        return Footprint(0, 0)
    cache = KVCache()
    mx.eval(head(mx.zeros((1, 1, head.hidden_size), head.dtype), mx.zeros((1, 1), dtype=mx.int32), cache))
    return Footprint(_bytes_per_token(cache), 0)


def _bytes_per_token(part: KVCache | RotatingKVCache) -> int:
    slots = int(part.keys.shape[2])
    return int(part.keys.nbytes + part.values.nbytes) // max(slots, 1)


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
        self._asked: dict[tuple[Memory, int], float] = {}  # when, by the monotonic clock; for which request

    def join(self, sharer: Memory) -> None:
        """Add an engine whose models are loaded. Their bytes no longer count as loading."""
        self.loading = max(0, self.loading - sum(sharer.parameters.values()))
        if not self._sharers and self.limit is not None:
            self._spare_before = mx.set_cache_limit(self.limit // _SPARE_PART)
            if self._spare_before < self.limit // _SPARE_PART:  # a limit that is lower already stays
                mx.set_cache_limit(self._spare_before)
        self._sharers.append(sharer)

    def leave(self, sharer: Memory) -> None:
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
        return self.taken() + need - self.limit

    def taken(self) -> int:
        """Return the bytes of all models (loaded or loading), requests and cached prefixes."""
        return self.weights() + sum(one.reserved + one.cached for one in self._sharers) + self.loading

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

    def can_reclaim(self, need: int, sharer: Memory) -> bool:
        """Return whether `reclaim` would free enough."""
        others = sum(one.reclaimable for one in self._others(sharer))
        return self.missing(need) <= others + sharer.cached

    def room_for_prefixes(self, sharer: Memory) -> float:
        """Return the bytes that an engine's cache may have beside all that the others hold now."""
        if self.limit is None or not (self.loading or len(self._sharers) > 1):
            return math.inf
        return sharer.cached - self.missing(0)

    def may_come(self, need: int, sharer: Memory, uid: int) -> bool:
        """Return whether missing memory may become free soon: other requests end, or `on_pressure` was called.

        Args:
            uid: of the request. It is called once for each, and given ten seconds.
        """
        if any(one.reserved for one in self._others(sharer)):
            return True
        if self.on_pressure is None or self.missing(need) <= 0:
            return False
        if (sharer, uid) not in self._asked:
            self._asked[sharer, uid] = time.monotonic()
            self.on_pressure(need)
        return time.monotonic() - self._asked[sharer, uid] < _PATIENCE_S

    def forget(self, sharer: Memory, uid: int) -> None:
        """Forget that memory was asked for: the request has it, or has ended."""
        self._asked.pop((sharer, uid), None)

    def _others(self, sharer: Memory | None) -> Iterable[Memory]:
        return sorted((one for one in self._sharers if one is not sharer), key=lambda one: one.last_use)


ANSWER_TOKENS = 2048  # of the answer that admission counts: clients ask for the whole context and use little of it
# Per word of the vocabulary and row: a model's logits, as float32, normalised, and as a sampler changes them.
_ROW_BYTES = 16
_TAIL_BYTES = 4 * 2 * TAIL  # per word: the model's logits of the last tokens of a prompt


class Memory:
    """Predicts, reserves and reports; before `measure` everything is free.

    Reservations count against a limit that also covers the weights and the prefix cache.

    Attributes:
        limit: bytes for everything; None: everything fits.
        weights: bytes of the models.
        parameters: bytes of each array of its models, by identity: two engines can share a draft.
        pinned: its models are never unloaded.
        last_use: when it last let a request in, by the monotonic clock.
        jobs: in work or waiting, by uid; `rows_bytes` returns the bytes of the caches of all decoding rows, and
            `rows_padding` those that rows take beside their own, for room that gives way to requests.
        stop_background: ends background work.
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
        self._target = self._draft = self._head = self._whole = Footprint(0, 0)  # whole: the draft with all its layers
        self._strategies: frozenset[str] = frozenset()  # in which answers can be drafted
        self._target_weights = 0
        self._longest = pair.context_length  # tokens of prompt and answer that every rank has room for
        self._hidden_bytes = 0  # per token, passed on by the target's first layers
        self._ledger = LeakDetector()
        self._reserved: dict[int, Need] = {}
        self.jobs: dict[int, Job] = {}
        self.rows_bytes: Callable[[], int] = int
        self.rows_padding: Callable[[], int] = int
        self.stop_background: Callable[[], None] = lambda: None
        self.common = common or SharedMemory(config.memory_limit)
        self.pinned = pinned
        self.last_use = 0.0
        self.parameters: Mapping[int, int] = {}
        self.limit: int | None = None
        self.weights = 0

    def measure(self) -> None:
        """Measure the memory of a sequence on the MLX thread. If this fails, the first request reports the error."""
        pair, self.limit = self._pair, self._config.memory_limit or self.common.limit
        self._target_weights, draft_weights = _weights(pair)
        self.weights = self._target_weights + draft_weights
        self.parameters = weights_by_array(pair.target, pair.draft)
        self.common.join(self)
        self._caches.budget.room = self.room_for_prefixes
        try:
            self._strategies = self._possible_strategies()
            self._target = measure_footprint(pair.target, pair.context_length)
            self._draft = measure_footprint(pair.draft, pair.draft_context)
            self._whole = self._measure_whole()
            self._head = measure_head_footprint(pair.mtp)
            self._hidden_bytes = 0 if pair.stages is None else hidden_bytes(pair.stages)
        except Exception as error:  # noqa: BLE001 - the first request reports the error
            self._go_without(error)
            self.limit = None
        if (window := self.window()) < pair.context_length:
            log.warning(
                "memory leaves room for %d tokens of prompt and answer, of the model's %d; --memory-limit allows more",
                window,
                pair.context_length,
            )

    def _measure_whole(self) -> Footprint:
        """Measure what the paper's rule scores with: all layers of the draft."""
        pair = self._pair
        whole = None if pair.draft is None else full_draft_model(pair.draft)
        if whole is pair.draft:
            return self._draft
        return self._target if whole is pair.target else measure_footprint(whole, pair.draft_context)

    def _possible_strategies(self) -> frozenset[str]:
        pair, quantized = self._pair, self._config.kv_bits is not None
        if pair.ranks is not None:
            return frozenset()
        found = ((name, refusal(name, pair.target, pair.proposer, pair.mtp, quantized)) for name in STRATEGIES)
        return frozenset(name for name, reason in found if reason is None)

    def _go_without(self, error: Exception) -> None:
        log.error("could not measure memory use: requests are admitted without a prediction", exc_info=error)

    def close(self) -> None:
        """Return the engine's part of the shared budget, and freed memory to the system. MLX thread only."""
        self.common.leave(self)
        mx.clear_cache()

    @property
    def reserved(self) -> int:
        """Return the bytes of all reservations: forwards take turns and share the memory of the largest."""
        return sum(need.held for need in tuple(self._reserved.values())) + self._working + self.rows_padding()

    @property
    def _working(self) -> int:
        return max((need.working for need in tuple(self._reserved.values())), default=0)

    @property
    def cached(self) -> int:
        return self._caches.nbytes

    @property
    def reclaimable(self) -> int:
        """Return the bytes that a request may have: those of caches and of background work."""
        background = (self._reserved.get(job.uid, Need()) for job in self.jobs.values() if job.background)
        return self.cached + sum(need.total for need in background)

    def room_for_prefixes(self) -> float:
        """Return the bytes that cached prefixes may have, beside weights, requests and other engines."""
        own = math.inf if self.limit is None else self.limit - self.weights - self.reserved
        return min(own, self.common.room_for_prefixes(self))

    @property
    def held(self) -> int:
        """Return the measured bytes of caches and requests."""
        return self._caches.nbytes + self._requests

    @property
    def _requests(self) -> int:
        return self.rows_bytes() + sum(self._arrays(job) for job in self.jobs.values())

    def evict(self, nbytes: int) -> None:
        """Evict at least `nbytes` cached bytes, or all of them."""
        self._caches.budget.shrink(nbytes)

    def reserve(self, uid: int, need: Need) -> bool:
        """Reserve the bytes for a request if they are free, or after eviction. Evict nothing if that is not enough."""
        if not self.may_fit(need):
            return False
        if (missing := self._missing(need)) > 0:
            self.evict(missing)
        if self.common.missing(more := self._added(need)) > 0:
            self.common.reclaim(more, self)
        if not self.reserve_free(uid, need):
            return False
        self.last_use = time.monotonic()
        self.common.forget(self, uid)
        return True

    def reserve_free(self, uid: int, need: Need) -> bool:
        """Reserve the bytes if they are free now. Evicts nothing."""
        if not self.fits(need):
            return False
        self._reserved[uid] = need
        return True

    def extend(self, uid: int, tokens: int) -> None:
        """Reserve more tokens for an answer that is longer than admission counted.

        It goes on even if they are not free. Cached prefixes give way.
        """
        if uid in self._reserved:
            held, working = self._reserved[uid]
            self._reserved[uid] = Need(held + self._target.per_token * tokens, working)
            self.evict(max(0, self._missing(Need())))
            if self.common.missing(0) > 0:
                self.common.reclaim(0, self)

    def settle(self, job: Job, cache: Seq[Any]) -> None:
        """Lower a reservation to what its ended request still holds: the cache that was taken from the rows, too."""
        if job.uid in self._reserved:
            self._reserved[job.uid] = Need(cache_bytes(cache) + self._arrays(job))

    def release(self, uid: int) -> None:
        self._reserved.pop(uid, None)
        self.common.forget(self, uid)

    def fits(self, need: Need) -> bool:
        """Return whether the bytes are free now."""
        return self._missing(need) <= 0 and self.common.missing(self._added(need)) <= 0

    def may_fit(self, need: Need) -> bool:
        """Return whether the bytes are free, or would be with empty caches."""
        return self._missing(need) <= self.cached and self.common.can_reclaim(self._added(need), self)

    def _added(self, need: Need) -> int:
        """Return the bytes that this need adds to the reservations, from which the rows' padding goes."""
        return need.held + max(0, need.working - self._working) - self.rows_padding()

    def padding_room(self, own: int) -> int | None:
        """Return the bytes that decoding rows may take beside their own: what is free, and a part of the prefixes.

        Prefixes lose at most half as much as the rows take themselves.

        Args:
            own: bytes of all rows.
        """
        taken = (self.limit, self.weights + self.reserved + self.cached), (self.common.limit, self.common.taken())
        free = min((limit - used for limit, used in taken if limit is not None), default=None)
        return None if free is None else max(0, free + self.rows_padding()) + min(self.cached, own // 2)

    def evict_for_rows(self) -> None:
        """Evict the prefixes whose place decoding rows have taken."""
        over = self._missing(Need()) + self.rows_padding()
        if (over := max(over, self.common.missing(0))) > 0:
            self.evict(over)

    def _missing(self, need: Need) -> int:
        if self.limit is None:
            return 0
        return self.weights + self.reserved + self._added(need) + self.cached - self.limit

    def may_come(self, uid: int, need: Need) -> bool:
        """Return whether memory that other engines hold may become free for a request."""
        return self.common.may_come(need.total, self, uid)

    def can_ever(self, request: GenerationRequest, mode: Mode) -> bool:
        """Return whether it fits with no other job, empty caches, and every unpinned model unloaded."""
        free = self._free()
        fits = free is None or self.need(request, mode).total <= free
        return fits and self._tokens(request) <= self._longest

    def _free(self) -> int | None:
        """Return the bytes that one request may have; None: any number."""
        if self.limit is None:
            return None
        room = self.common.room(self)
        return self.limit - self.weights if room is None else min(self.limit - self.weights, room)

    def lower_limit(self) -> None:
        """Lower the limit after an out-of-memory error, to four fifths of the memory beside the weights."""
        if self.limit is None:
            return
        less = (self.limit - self.weights) // 5
        self.limit -= less
        if self.common.limit is not None:
            self.common.limit -= less
        log.warning("the memory limit is %d MiB from now on", self.limit >> 20)

    def _tokens(self, request: GenerationRequest) -> int:
        return len(request.prompt) + min(request.max_tokens, ANSWER_TOKENS)

    def need(self, request: GenerationRequest, mode: Mode, rows: int = 0) -> Need:
        """Predict the need: prompt and answer in the target, the prompt in the draft, and what proposes the answer.

        Args:
            rows: of logits that are read at once, if there are more than the request asks for.
        """
        rows = max(rows, _rows_of(request))
        return self._predict(request, mode, self._strategy(request) if self.can_draft(request, mode) else None, rows)

    def can_draft(self, request: GenerationRequest, mode: Mode) -> bool:
        """Return whether the answer may be drafted: what proposes fits too, as in `can_ever`."""
        if (strategy := self._strategy(request)) is None:
            return False
        free = self._free()
        return free is None or self._predict(request, mode, strategy, _rows_of(request)).total <= free

    def need_inspection(self, request: GenerationRequest) -> Need:
        """Predict the need of scoring a prompt."""
        return self._need((self._whole if self._is_paper(request) else self._draft, self._draft_tokens(request)))

    def _strategy(self, request: GenerationRequest) -> str | None:
        strategy = request.specprefill.strategy(self._config.speculation)
        return strategy if strategy in self._strategies else None

    def _predict(self, request: GenerationRequest, mode: Mode, strategy: str | None, rows: int) -> Need:
        tokens, prompt = self._tokens(request), len(request.prompt)
        parts, read, more = [(self._target, tokens)], 0, self._row_bytes
        if mode == "sparse" and self._is_paper(request):
            parts.append((self._whole, self._draft_tokens(request)))
        elif mode == "sparse" and self._hidden_bytes:  # the caches of the first layers are the target's
            more += self._hidden_bytes * prompt
        elif mode == "sparse":
            read = self._draft_tokens(request)
        if strategy is not None:
            read = max(read, self._drafted_tokens(strategy, tokens, prompt))
            parts += self._proposing(strategy, tokens)
        return self._need(*parts, *([(self._draft, read)] if read else []), rows=rows, more=more)

    @property
    def _row_bytes(self) -> int:
        """Return the bytes of an answer's logits in a decode step."""
        return self._pair.vocab_size * _ROW_BYTES

    def _is_paper(self, request: GenerationRequest) -> bool:
        return (request.specprefill.rule or self._config.rule) == "paper"

    def _draft_tokens(self, request: GenerationRequest) -> int:
        return round(len(request.prompt) * self._pair.draft_ratio)

    def _drafted_tokens(self, strategy: str, tokens: int, prompt: int) -> int:
        """Return the tokens of prompt and answer that the draft holds while it proposes."""
        if strategy == "triforce":
            speculation = self._config.speculation
            return tokens - max(0, prompt - speculation.sinks - speculation.window)
        return tokens if strategy == "draft" else 0

    def _proposing(self, strategy: str, tokens: int) -> list[tuple[Footprint, int]]:
        """Return the other footprints of what proposes an answer, and the tokens of each."""
        if strategy == "triforce":  # a part of the target's cache is copied
            return [(self._target, min(tokens, self._config.speculation.budget))]
        return [(self._head, tokens)] if strategy == "mtp" else []

    def _need(self, *parts: tuple[Footprint, int], rows: int = 0, more: int = 0) -> Need:
        """Return the need of sequences that are prefilled one after the other. Caches grow by steps.

        Args:
            rows: of logits that are read at once; 0: those of the prompt's end, for the last one's sake.
            more: bytes that are held beside the caches.
        """
        step, logits = self._config.prefill_step, max(self._pair.vocab_size * _TAIL_BYTES, rows * self._row_bytes)
        return Need(
            more + sum(part.of_held(tokens + KVCache.step) for part, tokens in parts),
            max(logits, *(part.working(tokens, step) for part, tokens in parts)),
        )

    def window(self, request: GenerationRequest | None = None) -> int:
        """Return the tokens of prompt and answer that one request may have: the model's limit, or that of memory.

        Args:
            request: None: any that asks for nothing of its own.
        """
        if (free := self._free()) is None:
            return self._longest
        lengths, rows = range(1, self._longest + 1), 0 if request is None else _rows_of(request)
        key = partial(self._need, rows=rows, more=self._row_bytes)
        return bisect_right(lengths, free, key=lambda tokens: key((self._target, tokens)).total)

    def need_idle(self, tokens: int, dense: bool) -> Need:
        """Predict the need of prefilling `tokens` tokens in idle time, by the target if `dense`, else the draft.

        The target may read an answer, too, with all logits.
        """
        return self._need((self._target if dense else self._draft, tokens), rows=LOGITS_ROWS if dense else 0)

    def use(self) -> MemoryUse:
        """Return the memory in use, by consumer. May be called from any thread."""
        return MemoryUse(
            target_weights=self._target_weights,
            draft_weights=self.weights - self._target_weights,
            requests=sum(self._cache_bytes(job) for job in tuple(self.jobs.values())),
            reserved=self.reserved,
            prefix_cache=self._caches.nbytes,
            prefix_disk=self._caches.disk_nbytes,
            active=mx.get_active_memory(),
            spare=mx.get_cache_memory(),
            unaccounted_bytes=self._ledger.unaccounted,
            limit=self.limit,
        )

    def balance(self) -> None:
        """Compare MLX's memory with the memory accounted for, between two steps on the MLX thread."""
        held = {
            "weights": self.weights,
            "prefixes": self._caches.nbytes,
            "requests": self._requests,
            "other models": self.common.others(self),
        }
        self._ledger.balance(mx.get_active_memory(), held, self._working)

    def _arrays(self, job: Job) -> int:
        """Return the bytes of a job's caches, except a decoding row's. A cache of unknown size counts as predicted."""
        if not isinstance(job, AnswerJob):
            read = self._draft.of_held(job.done.get("draft", 0)) + self._target.of_held(job.done.get("prefill", 0))
            return max(read, self._reserved.get(job.uid, Need()).held)
        sequence, drafting = job.sequence, job.sequence.drafting
        total = cache_bytes(sequence.cache) + sequence.hidden.nbytes
        if sequence.stage == "draft" and (drafting is None or not drafting.cache):
            total += self._draft.of_held(job.done.get("draft", 0))
        return total if drafting is None else total + self._drafting(sequence, drafting)

    def _drafting(self, sequence: Sequence, drafting: AnswerDrafter) -> int:
        """Return the bytes of an answer's proposer."""
        total = cache_bytes(drafting.cache)
        if drafting.reader is not None:
            total += self._head.per_token * (len(sequence.request.prompt) + len(sequence.tokens))
        if drafting.strategy == "triforce":
            total += self._target.per_token * self._config.speculation.budget
        return total

    def _cache_bytes(self, job: Job) -> int:
        """Return the bytes of the request's target cache so far."""
        if not isinstance(job, AnswerJob) or job.sequence.stage == "queued":
            return 0
        sequence = job.sequence
        stored = sequence.cached + job.done.get("prefill", 0)
        if sequence.stage == "decode":
            stored = sequence.tokens_seen + len(sequence.tokens)
        return self._target.of_held(stored)


def _rows_of(request: GenerationRequest) -> int:
    """Return the rows of logits that a prefill reads at once, if it reads all of them."""
    return 0 if request.prompt_logprobs is None else LOGITS_ROWS


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


_PROBE = 16  # tokens of the forward
_COMPUTES = frozenset({"dbrx"})  # their forwards read values, which needs the weights
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_UNBUILDABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, ZeroDivisionError)


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model that has not been loaded.

    Attributes:
        refusal: why mlx-lm can't load it; None if it can.
        context: tokens that it was configured for.
        footprint: of a sequence, without forwards; None where it can't be known.
    """

    refusal: str | None
    context: int
    footprint: Footprint | None = None

    def cache_bytes(self, tokens: int) -> int | None:
        """Return the bytes of a sequence of `tokens` stored tokens."""
        return None if self.footprint is None else self.footprint.of_held(tokens)


def blueprint(config: Mapping[str, Any], dtype: str = "bfloat16") -> Blueprint:
    """Build the blueprint from the contents of config.json. Loads no weights and computes nothing.

    Builds mlx-lm's model and a forward over a few tokens without evaluating them: MLX knows the shapes of the cache's
    arrays.

    Args:
        dtype: of the floating-point weights as they are loaded, by which the cache is stored.
    """
    text = with_old_rope_names(config)
    context = context_length(text, None)
    try:
        model_class, arguments = classes_of(text)
    except _UNBUILDABLE as error:
        name = text.get("model_type")
        reason = f"config.json has no {error}" if name is None else f"mlx-lm has no architecture {name!r}"
        return Blueprint(reason, context)
    architecture = model_class.__module__.removeprefix("mlx_lm.models.")
    if architecture not in _COMPUTES:
        with suppress(*_UNBUILDABLE):
            return Blueprint(None, context, _build_footprint(model_class(arguments.from_dict(text)), dtype))
    return Blueprint(None, context)


def _build_footprint(model: nn.Module, dtype: str) -> Footprint:
    install_patches()
    model.set_dtype(_DTYPES.get(dtype, mx.bfloat16))
    model.eval()
    cache = make_prompt_cache(model)
    model(mx.zeros((1, _PROBE), dtype=mx.int32), cache=cache)
    return cache_footprint(cache)


def loaded_bytes(parameters: Mapping[str, int], dtype: Literal["auto", "stored"] = "auto") -> int:
    """Return the bytes of the weights once loaded.

    Args:
        parameters: how many elements of each type of safetensors the files hold.
        dtype: "auto" as in `load_pair`: the CPU backend has half precision cast to float32.
    """
    cast = dtype == "auto" and mx.default_device() == mx.Device(mx.cpu)
    sizes = _BYTES | ({"BF16": 4, "F16": 4} if cast else {})
    return sum(count * sizes.get(kind, 1) for kind, count in parameters.items())
