"""One request from prompt to last token, and the one place where sparse prefill falls back to full."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from ..cache.positioned import make_positioned_cache, quantize_kv
from ..config import EngineConfig
from ..decoding.autoregressive import decode
from ..errors import ContextLengthError, InvalidRequestError, RequestCancelled, SparseUnsupportedError
from ..loading import ModelPair
from ..prefill.plan import PrefillPlan, plan_prefill
from ..prefill.scoring import Scores, score_prompt
from ..prefill.selection import Selection, chunk_means, kept_spans, select_chunks
from ..prefill.sparse import prefill
from ..request import (
    Account,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    PromptLogprobs,
    Stage,
    Timings,
)
from ..sampling import check_sampling, logits_processors, make_sampler, top_logprobs

__all__ = ["Runner"]

log = logging.getLogger(__name__)


@dataclass
class _Sequence:
    """Everything mutable about one request. Lives on the MLX thread."""

    request: GenerationRequest
    plan: PrefillPlan
    started: float
    timings: Timings
    cache: list[Any] = field(default_factory=list)
    shift: int = 0
    kept: npt.NDArray[np.int32] | None = None
    stage: Stage = "queued"
    generated: int = 0

    def clock(self, **stages: float) -> None:
        self.timings = replace(self.timings, **stages)

    def account(self) -> Account:
        M = len(self.request.prompt)
        kept = M if self.kept is None else int(self.kept.size)
        spans = ((0, M),) if self.kept is None else kept_spans(self.kept)
        return Account(
            mode=self.plan.mode,
            reason=self.plan.reason,
            prompt_tokens=M,
            kept_tokens=kept,
            keep_pct=None if self.kept is None else round(kept / M, 6),
            timings=self.timings,
            kept_spans=spans if self.request.specprefill.return_spans else None,
        )


class Runner:
    """Runs requests on the calling thread.

    Attributes:
        fallbacks: how often each stage of a sparse prefill failed and the request went on with a full one.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self.pair = pair
        self.config = config
        self.fallbacks: Counter[str] = Counter()

    def check(self, request: GenerationRequest) -> None:
        """Refuse what can never run.

        Raises:
            InvalidRequestError: names the field; ContextLengthError when the prompt leaves no room.
        """
        M = len(request.prompt)
        if M == 0:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if request.max_tokens < 0 or (request.max_tokens == 0 and request.prompt_logprobs is None):
            raise InvalidRequestError("max_tokens must be at least 1", field="max_tokens")
        if M + request.max_tokens > self.pair.context_length:
            raise ContextLengthError(M, request.max_tokens, self.pair.context_length)
        if not all(0 <= token < self.pair.vocab_size for token in request.prompt):
            raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt")
        check_sampling(request.sampling, self.pair.vocab_size)

    def plan(self, request: GenerationRequest) -> PrefillPlan:
        return plan_prefill(
            request,
            self.config,
            sparse_refusal=self.pair.sparse_refusal,
            draft_context=self.pair.draft_context,
        )

    def run(self, request: GenerationRequest, submitted: float) -> Generator[Event, None, None]:
        """Yields events between slices of work; the last one is `Finished` or `Failed`.

        Throw `RequestCancelled` into it to stop the request; it answers with its last event.

        Args:
            submitted: `time.perf_counter()` when the request was queued.
        """
        started = time.perf_counter()
        sequence = _Sequence(request, self.plan(request), started, Timings(queue_ms=1e3 * (started - submitted)))
        try:
            yield Progress("queued", 0, len(request.prompt))
            yield from self._run(sequence)
        except RequestCancelled:
            yield Finished("cancelled", sequence.generated, sequence.account())
        except Exception as error:
            log.exception("request failed")
            yield Failed(error, sequence.account())

    def score(self, request: GenerationRequest) -> Generator[Progress, None, tuple[Scores, Selection]]:
        """Draft and selection only."""
        if self.pair.draft is None:
            raise SparseUnsupportedError("no draft model is loaded")
        plan = self.plan(request)
        scores = yield from self._scores(request)
        return scores, self._select(scores, plan)

    def _run(self, sequence: _Sequence) -> Generator[Event, None, None]:
        if sequence.plan.mode == "sparse":
            logits = yield from self._sparse_or_full(sequence)
        else:
            logits = yield from self._full(sequence)
        yield from self._decode(sequence, logits)

    def _sparse_or_full(self, sequence: _Sequence) -> Generator[Event, None, mx.array]:
        try:
            return (yield from self._sparse(sequence))
        except RequestCancelled:
            raise
        except Exception as error:
            reason = f"fallback: {sequence.stage} failed: {type(error).__name__}: {error}"
            log.warning("full prefill instead of sparse: %s", reason, exc_info=error)
            self.fallbacks[sequence.stage] += 1
        sequence.plan = sequence.plan.as_full(reason)
        sequence.cache, sequence.kept = [], None
        mx.clear_cache()
        return (yield from self._full(sequence))

    def _sparse(self, sequence: _Sequence) -> Generator[Event, None, mx.array]:
        request = sequence.request
        sequence.stage = "draft"
        begun = time.perf_counter()
        scores = yield from self._scores(request)
        scored = time.perf_counter()
        sequence.clock(draft_ms=1e3 * (scored - begun))
        sequence.stage = "select"
        selection = self._select(scores, sequence.plan)
        sequence.clock(select_ms=1e3 * (time.perf_counter() - scored))
        yield Progress("select", int(selection.kept.size), len(request.prompt))
        sequence.stage = "prefill"
        sequence.cache = make_positioned_cache(self.pair.target)
        begun = time.perf_counter()
        logits = yield from prefill(
            self.pair.target, sequence.cache, request.prompt, selection.kept, self.config.prefill_step
        )
        sequence.clock(prefill_ms=1e3 * (time.perf_counter() - begun))
        sequence.kept = selection.kept
        return logits

    def _scores(self, request: GenerationRequest) -> Generator[Progress, None, Scores]:
        assert self.pair.draft is not None
        stops = request.stop_token_ids | self.pair.eos_token_ids
        return (yield from score_prompt(self.pair.draft, request.prompt, self.config.scoring, stops))

    def _select(self, scores: Scores, plan: PrefillPlan) -> Selection:
        size = self.config.selection.chunk_size
        return select_chunks(chunk_means(scores.importance, size), plan.forced, plan.keep, size)

    def _full(self, sequence: _Sequence) -> Generator[Event, None, mx.array]:
        request, target = sequence.request, self.pair.target
        sequence.stage = "prefill"
        sequence.cache = make_prompt_cache(target)
        begun = time.perf_counter()
        if request.prompt_logprobs is not None:
            logits = yield from self._prompt_logprobs(sequence, request.prompt_logprobs)
        else:
            logits = yield from prefill(target, sequence.cache, request.prompt, None, self.config.prefill_step)
        sequence.clock(prefill_ms=1e3 * (time.perf_counter() - begun))
        return logits

    def _prompt_logprobs(self, sequence: _Sequence, count: int) -> Generator[Event, None, mx.array]:
        """Full prefill that looks at every row's logits; one step's (step, V) float32 block is held at a time."""
        prompt, M = sequence.request.prompt, len(sequence.request.prompt)
        tokens = mx.array(prompt)[None]
        entries = []
        for start in range(0, M, self.config.prefill_step):
            end = min(start + self.config.prefill_step, M)
            logits: mx.array = self.pair.target(tokens[:, start:end], cache=sequence.cache)[0]
            raw = logits.astype(mx.float32)
            following = prompt[start + 1 : end + 1]
            table = (raw - mx.logsumexp(raw, axis=-1, keepdims=True))[: len(following)]
            entries += top_logprobs(table, following, count)
            yield Progress("prefill", end, M)
        yield PromptLogprobs(tuple(entries))
        return logits[-1:]

    def _decode(self, sequence: _Sequence, logits: mx.array) -> Generator[Event, None, None]:
        request = sequence.request
        self._quantize(sequence)
        sequence.stage = "decode"
        tokens = decode(
            self.pair.target,
            sequence.cache,
            logits,
            make_sampler(request.sampling, self.pair.vocab_size),
            logits_processors(request.sampling),
            request.max_tokens,
            request.logprobs,
            sequence.shift,
        )
        begun = time.perf_counter()
        reason: FinishReason = "length"
        for event in tokens:
            now = time.perf_counter()
            if sequence.generated == 0:
                sequence.clock(ttft_ms=1e3 * (now - sequence.started))
            sequence.generated += 1
            sequence.clock(decode_ms=1e3 * (now - begun))
            yield event
            if event.token in request.stop_token_ids:
                reason = "stop"
                break
        yield Finished(reason, sequence.generated, sequence.account())

    def _quantize(self, sequence: _Sequence) -> None:
        if self.config.kv_bits is None:
            return
        try:
            sequence.cache, sequence.shift = quantize_kv(sequence.cache, self.config.kv_group_size, self.config.kv_bits)
        except SparseUnsupportedError as error:
            log.warning("the KV cache stays unquantised: %s", error.reason)
