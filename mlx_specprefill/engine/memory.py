"""What requests need and hold, in bytes: predicted from measurements on the models themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import mlx.core as mx

from ..config import EngineConfig
from ..loading import ModelPair
from ..request import GenerationRequest
from .admission import Admission, Footprint
from .caches import EngineCaches
from .footprint import default_limit, measure_footprint, measure_head_footprint, weight_bytes
from .jobs import Job
from .planning import Costs, Planner
from .stats import MemoryUse

__all__ = ["Memory"]

log = logging.getLogger(__name__)
_ANSWER_TOKENS = 2048  # of the answer that admission counts: clients ask for the whole context and use little of it


class Memory:
    """Predicts and reports; before `measure` everything is free.

    Attributes:
        admission: which predictions fit, and what has been promised to whom.
    """

    def __init__(
        self, pair: ModelPair, config: EngineConfig, caches: EngineCaches, costs: Costs, planner: Planner
    ) -> None:
        self._pair = pair
        self._config = config
        self._caches = caches
        self._costs = costs
        self._planner = planner
        self._target = self._draft = self._head = Footprint(0, 0, 0)
        self._weights = (0, 0)  # bytes of target and draft
        self.admission = Admission(None, 0)

    def measure(self) -> None:
        """Measure what a sequence costs, on the MLX thread. A model that can't even do this tells its first request."""
        pair, limit = self._pair, self._config.memory_limit or default_limit()
        head = 0 if isinstance(pair.mtp, str) else pair.mtp.nbytes
        self._weights = weight_bytes(pair.target) + head, weight_bytes(pair.draft, pair.target) if pair.draft else 0
        try:
            self._costs.measure()
            self._target = measure_footprint(pair.target, self._costs.longest_slice("prefill"))
            self._draft = measure_footprint(pair.draft, self._costs.longest_slice("draft"))
            self._head = measure_head_footprint(pair.mtp)
        except Exception:
            log.exception("could not measure memory use: requests are admitted without a prediction")
            limit = None
        self.admission = Admission(limit, sum(self._weights), lambda: self._caches.nbytes, self._caches.reclaim)

    def need(self, request: GenerationRequest) -> int:
        """Predicted bytes: the prompt and the answer in the target and its MTP head, the prompt in the draft."""
        if self.admission.limit is None:
            return 0
        tokens = len(request.prompt) + min(request.max_tokens, _ANSWER_TOKENS)
        need = self._target.of(tokens)
        if (request.specprefill.speculative or self._config.speculation.strategy) in ("mtp", "auto"):
            need += self._head.of(tokens)
        wants_draft = self._planner.plan(request).mode == "sparse"
        return need + (self._draft.of(len(request.prompt)) if wants_draft else 0)

    def need_dense(self, tokens: int) -> int:
        """The same, of making a text of that many tokens dense."""
        return self._target.of(tokens) if self.admission.limit is not None else 0

    def use(self, jobs: Iterable[Job]) -> MemoryUse:
        """Who holds what now; from any thread."""
        sessions = self._caches.sessions.nbytes
        return MemoryUse(
            target_weights=self._weights[0],
            draft_weights=self._weights[1],
            requests=sum(self._held(job) for job in jobs),
            reserved=self.admission.reserved,
            prefix_cache=max(0, self._caches.nbytes - sessions),
            sessions=sessions,
            prefix_disk=self._caches.disk_nbytes,
            active=mx.get_active_memory(),
            spare=mx.get_cache_memory(),
            limit=self.admission.limit,
        )

    def _held(self, job: Job) -> int:
        """Of a request's target cache, as far as it has come."""
        sequence = job.sequence
        if sequence is None or sequence.stage == "queued":
            return 0
        stored = sequence.cached + job.done.get("prefill", 0)
        if sequence.stage == "decode":
            read = len(sequence.request.prompt) if sequence.kept is None else int(sequence.kept.size)
            stored = read + len(sequence.tokens)
        return self._target.constant + self._target.per_token * stored
