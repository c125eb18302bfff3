"""One engine's memory, in bytes: what a request needs and reserves, the window that fits, the part for prefixes."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ...adapters.depth import full_draft_model
from ...cache.feeding import TAIL
from ...choosing.sampling import LOGITS_ROWS
from ...config import EngineConfig
from ...errors import Refused, SettingsError
from ...loading.footprint import (
    Footprint,
    cache_bytes,
    measure_footprint,
    warm_up,
    weight_bytes,
    weights_by_array,
)
from ...pair import ModelPair
from ...prefill_report import Mode
from ...request import GenerationRequest
from ...selection.question_lines import rows_of
from ...speculative.proposer import Held
from ...speculative.strategies import STRATEGIES, refusal
from ..prefixes.caches import LEAST_BYTES, EngineCaches
from ..requests.drafting import models_of
from ..requests.job import AnswerJob, Job, Need
from .machine import device_memory
from .shared import SharedMemory

log = logging.getLogger(__name__)
ANSWER_TOKENS = 2048  # of the answer that admission counts: clients ask for the whole context and use little of it
LONG_REQUEST = 32768  # tokens of the request for which there is to be room
_LEAST_STEP = 128  # tokens of a forward
_PREFIX_PART = 4  # of what such a request leaves, by default
# Per word of the vocabulary and row: a model's logits, as float32, normalised, and as a sampler changes them.
_ROW_BYTES = 16
_ASKED_BYTES = 16  # per asked token and token of the prompt, of one head at a time: likewise
_TAIL_BYTES = 4 * 2 * TAIL  # per word: the model's logits of the last tokens of a prompt
# Predicts what a strategy holds of a prompt's tokens, and of those of prompt and answer.
_FIT = -1  # number of the estimates' fit among reservations
_Proposing = Callable[[int, int], Held]


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
    limit: int | None


class Memory:
    """Predicts what requests need, reserves it, and reports what is in use. Before `measure` everything is free.

    Reservations count against a limit that also covers the weights and the prefix cache.

    Attributes:
        limit: bytes for everything; None: everything fits.
        weights: bytes of the models.
        step: tokens of a forward at most.
        parameters: bytes of each array of its models, by identity: two engines can share a draft.
        pinned: its models are never unloaded.
        last_use: when it last let a request in, by the monotonic clock.
        jobs: in work or waiting, by uid.
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
        self._target = self._draft = self._whole = Footprint(0, 0)  # whole: the draft with all its layers
        self._proposing: dict[str, _Proposing] = {}  # by the strategies in which answers can be drafted
        self._target_weights = 0
        self._longest = pair.context_length  # tokens of prompt and answer that every rank has room for
        self._reserved: dict[int, Need] = {}
        self.jobs: dict[int, Job] = {}
        self.stop_background: Callable[[], None] = lambda: None
        self.common = common or SharedMemory(config.memory_limit)
        self.pinned = pinned
        self.last_use = 0.0
        self.parameters: Mapping[int, int] = {}
        self.limit: int | None = None
        self.weights = 0
        self.step = config.prefill_step

    def measure(self) -> None:
        """Measure the memory of a sequence on the MLX thread. If this fails, the first request reports the error."""
        pair, self.limit = self._pair, self._config.memory_limit or self.common.limit
        self._target_weights, draft_weights = _weights(pair)
        self.weights = self._target_weights + draft_weights
        self.parameters = weights_by_array(pair.target, pair.draft)
        self.common.join(self)
        self._caches.budget.room = self.room_for_prefixes
        try:
            self._proposing = self._possible_strategies()
            warm_up(pair.target, pair.draft)
            self._target = measure_footprint(pair.target, pair.context_length)
            self._draft = measure_footprint(pair.draft, pair.draft_context)
            self._whole = self._measure_whole()
        except Exception as error:  # noqa: BLE001 - the first request reports the error
            self._go_without(error)
            self.limit = None
        self._shorten_step()
        if self._config.prefix_cache_bytes is None:
            self._caches.budget.most = self._share_for_prefixes()
        if (window := self.window()) < pair.context_length:
            log.warning(
                "memory leaves room for %d tokens of prompt and answer, of the model's %d; --memory-limit allows more",
                window,
                pair.context_length,
            )

    def _shorten_step(self) -> None:
        """Halve the longest forward until one long request fits: shorter ones need less memory beside its cache."""
        wanted = min(self._longest, LONG_REQUEST)
        while self.window() < wanted and self.step >= 2 * _LEAST_STEP:
            self.step //= 2
        if self.step < self._config.prefill_step:
            log.info("prompts are read %d tokens at a time at most: memory is short for %d", self.step, wanted)

    def _share_for_prefixes(self) -> int:
        """Return a part of the bytes that the models and one long request leave."""
        tokens, free = min(self._longest, LONG_REQUEST), self._free()
        if free is None:
            return LEAST_BYTES
        request = self._need((self._target, tokens), (self._draft, round(tokens * self._pair.draft_ratio)))
        return max(LEAST_BYTES, (free - request.total) // _PREFIX_PART)

    def _measure_whole(self) -> Footprint:
        """Measure what the paper's rule scores with: all layers of the draft."""
        pair = self._pair
        whole = None if pair.draft is None else full_draft_model(pair.draft)
        if whole is pair.draft:
            return self._draft
        return self._target if whole is pair.target else measure_footprint(whole, pair.draft_context)

    def _possible_strategies(self) -> dict[str, _Proposing]:
        models = models_of(self._pair, self._config)
        possible = (name for name in STRATEGIES if refusal(name, models) is None)
        return {name: partial(STRATEGIES[name].predict, models) for name in possible}

    def _go_without(self, error: Exception) -> None:
        log.error("could not measure memory use: requests are admitted without a prediction", exc_info=error)

    def close(self) -> None:
        """Return the engine's part of the shared budget, and freed memory to the system. MLX thread only."""
        self.common.leave(self)
        mx.clear_cache()

    @property
    def reserved(self) -> int:
        """Return the bytes of all reservations: forwards take turns and share the memory of the largest."""
        return sum(need.held for need in tuple(self._reserved.values())) + self._working

    @property
    def _working(self) -> int:
        return max((need.working for need in tuple(self._reserved.values())), default=0)

    @property
    def cached(self) -> int:
        return self._caches.nbytes

    @property
    def reclaimable(self) -> int:
        """Return the bytes that a request may have: those of caches and of background work."""
        background = [job.uid for job in self.jobs.values() if job.background]
        return self.cached + sum(self._reserved.get(uid, Need()).total for uid in (_FIT, *background))

    def room_for_prefixes(self) -> float:
        """Return the bytes that cached prefixes may have, beside weights, requests and other engines."""
        own = math.inf if self.limit is None else self.limit - self.weights - self.reserved
        return min(own, self.common.room_for_prefixes(self))

    def has_room_for_prefix(self, tokens: int, states: int, beside: int) -> bool:
        """Return whether a dense prefix of the target can be kept beside `beside` bytes of other prefixes.

        Args:
            states: checkpoints of what the model can't cut.
        """
        nbytes, free = self._target.per_token * tokens + self._target.constant * states, self._free()
        most = self._caches.budget.most
        return nbytes + beside <= (most if free is None else min(most, free))

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

    def settle(self, job: AnswerJob, cache: Seq[Any]) -> None:
        """Lower a reservation to what its ended request still holds: the cache that was taken from the rows, too."""
        if job.uid in self._reserved:
            active = job.active
            drafting = () if active.drafting is None else active.drafting.caches
            self._reserved[job.uid] = Need(sum(map(cache_bytes, (cache, active.cache, drafting))))

    def release(self, uid: int) -> None:
        self._reserved.pop(uid, None)
        self.common.forget(self, uid)

    def reserve_fit(self, nbytes: int) -> bool:
        """Reserve what the estimates' fit adds up, if it is free now or reserved already. Evicts nothing."""
        return _FIT in self._reserved or self.reserve_free(_FIT, Need(nbytes))

    def release_fit(self) -> None:
        self._reserved.pop(_FIT, None)

    def fits(self, need: Need) -> bool:
        """Return whether the bytes are free now."""
        return self._missing(need) <= 0 and self.common.missing(self._added(need)) <= 0

    def may_fit(self, need: Need) -> bool:
        """Return whether the bytes are free, or would be with empty caches."""
        return self._missing(need) <= self.cached and self.common.can_reclaim(self._added(need), self)

    def _added(self, need: Need) -> int:
        """Return the bytes that this need adds to the reservations."""
        return need.held + max(0, need.working - self._working)

    def _missing(self, need: Need) -> int:
        if self.limit is None:
            return 0
        return self.weights + self.reserved + self._added(need) + self.cached - self.limit

    def can_be_freed(self, uid: int, need: Need) -> bool:
        """Return whether memory that other engines hold may become free for a request."""
        return self.common.can_be_freed(need.total, self, uid)

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

    def _strategy(self, request: GenerationRequest) -> _Proposing | None:
        return self._proposing.get(request.specprefill.strategy(self._config.speculation))

    def _predict(self, request: GenerationRequest, mode: Mode, strategy: _Proposing | None, rows: int) -> Need:
        tokens, prompt = self._tokens(request) + request.room_behind, len(request.prompt)
        parts, read, more = [(self._target, tokens)], 0, self._row_bytes
        if mode == "sparse" and self._is_paper(request):
            parts.append((self._whole, self._draft_tokens(request)))
        elif mode == "sparse":
            read = self._draft_tokens(request)
        if strategy is not None:
            held = strategy(prompt, tokens)
            read, more = max(read, held.draft), more + held.nbytes
            parts += [(self._target, held.target)] if held.target else []
        return self._need(*parts, *([(self._draft, read)] if read else []), rows=rows, more=more)

    @property
    def _row_bytes(self) -> int:
        """Return the bytes of an answer's logits in a decode step."""
        return self._pair.vocab_size * _ROW_BYTES

    def _is_paper(self, request: GenerationRequest) -> bool:
        return (request.specprefill.rule or self._config.rule) == "paper"

    def _draft_tokens(self, request: GenerationRequest) -> int:
        return round((len(request.prompt) + request.room_behind) * self._pair.draft_ratio)

    def _need(self, *parts: tuple[Footprint, int], rows: int = 0, more: int = 0) -> Need:
        """Return the need of sequences that are prefilled one after the other. Caches grow by steps.

        Args:
            rows: of logits that are read at once; 0: those of the prompt's end, for the last one's sake.
            more: bytes that are held beside the caches.
        """
        logits = max(self._pair.vocab_size * _TAIL_BYTES, rows * self._row_bytes)
        return Need(
            more + sum(part.of_held(tokens + KVCache.step) for part, tokens in parts),
            max(logits, *(self._forward(part, tokens) for part, tokens in parts)),
        )

    def _forward(self, part: Footprint, tokens: int) -> int:
        """Return the bytes of a sequence's largest forward. No fused kernel has the attention of what a draft asks."""
        asked = rows_of(tokens) * tokens * _ASKED_BYTES if part is self._draft else 0
        return max(part.working(tokens, self.step), asked)

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
        if dense:
            return self._need((self._target, tokens), rows=LOGITS_ROWS)
        return self._need((self._draft, round(tokens * self._pair.draft_ratio)))

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
            limit=self.limit,
        )

    def _cache_bytes(self, job: Job) -> int:
        """Return the bytes of the request's target cache so far."""
        if not isinstance(job, AnswerJob) or job.active.stage == "queued":
            return 0
        active = job.active
        stored = active.prefix.length + job.done.get("prefill", 0)
        if active.stage == "decode":
            stored = active.tokens_seen + len(active.decoded.tokens)
        return self._target.of_held(stored)


def _rows_of(request: GenerationRequest) -> int:
    """Return the rows of logits that are read at once: the prompt's, if all of them, or those of questions."""
    return 0 if request.prompt_logprobs is None and not request.questions else LOGITS_ROWS


def _weights(pair: ModelPair) -> tuple[int, int]:
    """Return the bytes of the target with what proposes for it, and of the draft."""
    own = sum(part.nbytes for part in pair.own_parts.values() if not isinstance(part, Refused))
    own += 0 if pair.estimates is None else pair.estimates.nbytes
    return weight_bytes(pair.target) + own, weight_bytes(pair.draft, pair.target) if pair.draft else 0


def check_limit(pair: ModelPair, config: EngineConfig) -> None:
    """Check that the configured limit has room for the weights, and warn of one that the machine has no memory for.

    Raises:
        SettingsError: it has not.
    """
    limit, weights, there = config.memory_limit, _weights(pair), device_memory()
    if limit is not None and there is not None and limit > there:
        log.warning("--memory-limit of %d MiB is above this machine's memory of %d MiB", limit >> 20, there >> 20)
    if limit is not None and limit <= sum(weights):
        target, draft = (f"{nbytes / 2**20:.1f} MiB" for nbytes in weights)
        raise SettingsError(
            f"--memory-limit of {limit / 2**20:.1f} MiB is below the weights: target {target}, draft {draft}. At least "
            f"{sum(weights) / 2**20:.1f} MiB are needed, and more for requests and caches"
        )
