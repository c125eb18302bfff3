"""Prefills a prompt, chunk by chunk: the cached prefix, the choice of tokens, what is stored, the fallback to full."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...adapters.estimates import Known
from ...arrays import Indices
from ...cache.feeding import Placing, feed, forward_ends
from ...cache.positioned import estimated_tokens, is_stateful, place, recalling
from ...cache.prefix.nodes import common_length
from ...choosing.sampling import LOGITS_ROWS, log_softmax, top_logprobs
from ...config import EngineConfig
from ...errors import RequestCancelled, device_error
from ...events import Event, Progress, PromptLogprobs
from ...pair import ModelPair
from ...request import GenerationRequest
from ...selection.scorer import Scores
from ...selection.selector import next_ranked
from ..estimating import Estimating
from ..prefixes.caches import EngineCaches, empty_cache
from ..prefixes.lookup import Prefix, Prefixes
from ..requests.active_request import ActiveRequest
from .chunks import ChunkSizer
from .costs import CostModel
from .decisions import Decider
from .planner import Planner
from .scoring import DraftContextError, Extension, PromptScorer, Scoring

log = logging.getLogger(__name__)
Reader = Callable[..., mx.array]
PrefillSteps = Generator[Progress | PromptLogprobs, None, mx.array]
_LEAST_CHECKPOINT = 128  # tokens of a dense beginning that is worth a forward end
_STATE_EVERY = 4096  # tokens between checkpoints of state that can't be trimmed


class Prefiller:
    """Runs prefills.

    Attributes:
        planner: decides whether a prompt is read in full or in part.
        fallbacks: how often each stage of a sparse prefill failed and the request went on with a full one.
    """

    _scorer_type: Callable[..., PromptScorer] = PromptScorer  # `ranked.RankedPrefiller` has others
    _planner_type: Callable[..., Planner] = Planner

    def __init__(
        self, pair: ModelPair, config: EngineConfig, caches: EngineCaches, costs: CostModel, chunks: ChunkSizer
    ) -> None:
        self.pair = pair
        self.config = config
        self.caches = caches
        self.step = partial(chunks.size, "prefill")  # tokens of the target's next forward
        self.is_stateful = is_stateful(empty_cache(pair.target))
        self.decider = Decider(pair, self.step)
        self.estimating = Estimating(pair, config, chunks.size)
        self.prefixes = Prefixes(pair, caches, self.estimating)
        draft_step = partial(chunks.size, "draft")
        self.scorer = self._scorer_type(pair, config, caches, self.prefixes.edits, draft_step, self.estimating)
        self.planner = self._planner_type(pair, config, caches, costs, chunks, self.scorer, self.prefixes)
        self.fallbacks: Counter[str] = Counter()

    def run(self, active: ActiveRequest) -> Generator[Event, None, mx.array]:
        """Prefill a request, and answer its questions. If a sparse prefill fails, go on with a full one.

        Yield between prefill chunks; return the logits (1, V). Throw `RequestCancelled` into the generator to stop it.
        """
        yield Progress("queued", 0, len(active.request.prompt))
        try:
            active.plan, active.prefix = self.planner.decide(active.request, active.plan)
            yield from self.scorer.follow(active)
            if (scoring := self._scoring(active)) is not None:
                yield Progress("draft", 0, len(active.request.prompt))
            scores = None if scoring is None else (yield from scoring)
            reading = self._choose(active, scores)
            if scores is not None and active.prefix.edit is None and self.estimating.wants(active.request, active.plan):
                wanted = next_ranked(scores.importance, reading, active.prefix.length)
                active.known = Known(active.request.prompt, scores.cache, wanted)
            if active.plan.mode == "sparse" or not active.prefix.is_dense:
                yield Progress("select", reading.size, len(active.request.prompt))
            yield from self._begin_drafting(active, scores)
            scores = None  # frees the draft's cache, unless it is kept: the target needs the memory
            logits = yield from self.read(active, reading)
        except RequestCancelled:
            raise
        except Exception as error:
            # A full prefill would need several times as much of the device, or is what failed.
            if device_error(error) is not None or (active.reading.size and not active.is_sparse):
                raise
            self._start_over(active, error)
            yield from self._begin_drafting(active, None)
            logits = yield from self.read(active, self._choose(active, None))
        if active.request.questions:
            yield (yield from self.decider.decide(active))
        active.known, active.stage = None, "draft"
        if active.drafting is not None:
            yield from active.drafting.end(active.cache)
        return logits

    def _scoring(self, active: ActiveRequest) -> Scoring | None:
        """Return the steps to the scores, where new text may be dropped, or dropped text recalled; None where nothing
        is, or the draft can't read that much.
        """
        request, plan, prefix = active.request, active.plan, active.prefix
        if plan.mode == "full" and not self.scorer.recalls(request, prefix):
            return None
        active.text, active.stage = self.scorer.text.read(request.prompt), "draft"
        extension = Extension(prefix.length, int(prefix.dropped[-1]) + 1) if plan.mode == "full" else None
        try:
            return self.scorer.scores(request, plan, active.text, extension)
        except DraftContextError as error:
            active.plan = plan.as_full("draft-context", str(error))
            return None

    def _choose(self, active: ActiveRequest, scores: Scores | None) -> Indices:
        """Return the indices to read, ascending: absent ones of the prefix that are asked for, and of what follows it
        all or the chosen part.
        """
        if scores is not None:
            active.stage = "select"
            return self.scorer.choose(active, scores)
        new = np.arange(active.prefix.length, len(active.request.prompt), dtype=np.int32)
        return np.concatenate([active.prefix.unread, new])

    def _begin_drafting(self, active: ActiveRequest, scores: Scores | None) -> Generator[Progress, None, None]:
        """Prepare the draft to propose the answer from the cache of its scoring, if it will."""
        proposer = None if active.drafting is None else active.drafting.begin()
        if proposer is None or proposer.prompt_reader is None:
            return
        if scores is None or scores.importance.size < len(active.request.prompt):
            active.stage = "draft"
            proposer.cache = yield from self.scorer.read(proposer.prompt_reader, active.request)
        else:
            proposer.cache = scores.cache

    def _start_over(self, active: ActiveRequest, error: Exception) -> None:
        """Reset the request with mlx-lm's own caches: nothing that may have failed is used again."""
        log.exception("full prefill instead of sparse: %s failed", active.stage)
        self.fallbacks[active.stage] += 1
        reason = f"fallback: {active.stage} failed: {type(error).__name__}: {error}"
        active.plan = replace(active.plan.as_full("fallback", reason), selection_key=None)
        active.cache, active.prefix = list(make_prompt_cache(self.pair.target)), Prefix(miss=active.prefix.miss)
        active.known = None
        mx.clear_cache()

    def read(self, active: ActiveRequest, reading: Indices, again: bool = False) -> PrefillSteps:
        """Read these prompt indices behind the cached prefix, and store the cache at each stop.

        Those that the prefix covers are recalled. Cancelled, a full prefill keeps its chunks: a retry resumes from
        there.

        Args:
            again: as in `Prefixes.restore_prefix`.
        """
        request, active.stage = active.request, "prefill"
        if active.cache:
            active.reading = reading
        else:
            active.resume((yield from self.prefixes.restore_prefix(request, active.prefix, again)), reading)
        if not active.is_sparse:
            yield Progress("prefill", 0, active.reading.size, cached=active.prefix.length)
        recalled, new = np.split(active.reading, [np.searchsorted(active.reading, active.prefix.length)])
        proposer = None if active.drafting is None else active.drafting.proposer
        model = self.pair.target if proposer is None else proposer.read_along(self.pair.target, new)
        if request.prompt_logprobs is not None:
            return (yield from self._read_with_logprobs(active, model, request.prompt_logprobs))
        stops, fed = self._stops(active, new), 0
        if recalled.size:
            yield from self._recall(active, recalled)
        ends, positions = forward_ends(new.size, self.step, tuple(stops)), new if active.is_sparse else None
        steps = feed(model, active.cache, request.prompt[new], positions, ends, True, self._placing(active))
        try:
            for fed, logits in steps:  # noqa: B007
                if fed in stops:  # nearly all of the prompt is stored once the first token is out
                    active.keep_prompt(self.caches, stops[fed], later=stops[fed] >= len(request.prompt) - 1)
                yield Progress("prefill", recalled.size + fed, active.reading.size)
        except RequestCancelled:
            if fed and not active.is_sparse:
                active.keep_prompt(self.caches, active.prefix.length + fed)
            raise
        assert logits is not None, "the last token's logits are missing"
        if active.is_sparse and active.prefix.edit is None:
            active.estimated = estimated_tokens(active.cache)
        return logits

    def _placing(self, active: ActiveRequest) -> Placing:
        """Return what sets the positions of a forward, with estimates among them where the draft knows enough."""
        if active.known is None or (estimator := self.estimating.estimator) is None:
            return place
        return partial(estimator.place, known=active.known)

    def _recall(self, active: ActiveRequest, tokens: Indices) -> Generator[Progress, None, None]:
        """Read tokens that the prefix covers and does not hold."""
        with recalling(active.cache):
            ends = forward_ends(tokens.size, self.step, tail=0)
            for done, _ in feed(self.pair.target, active.cache, active.request.prompt[tokens], tokens, ends):
                yield Progress("prefill", done, active.reading.size)
        if active.prefix.edit is not None:
            self.prefixes.edits.settle(active.cache, active.prefix.edit)

    def _stops(self, active: ActiveRequest, new: Indices) -> dict[int, int]:
        """Return the counts of new tokens after which a forward ends, ascending, and the length that the cache then
        holds.
        """
        M, L = len(active.request.prompt), active.prefix.length
        ends = self.checkpoints(active.request, L)
        if not active.is_sparse:  # an identical prompt can't use a state at its end: the last is one token before it
            return {end - L: end for end in ends or [M]}
        if active.plan.selection_key is None:
            return {}
        if not self.is_stateful:
            return {new.size: M}
        counts = {int(np.searchsorted(new, end)): end for end in ends}
        dense = common_length(new, L + np.arange(new.size, dtype=np.int32))
        if active.prefix.is_dense and dense >= _LEAST_CHECKPOINT:
            counts[dense] = L + dense
        return {count: counts[count] for count in sorted(counts) if 0 < count < new.size}

    def checkpoints(self, request: GenerationRequest, start: int = 0) -> list[int]:
        """Return the lengths above `start` at which another request may branch off, ascending.

        Empty for a cache that can be cut at any length.
        """
        if not self.is_stateful:
            return []
        M = len(request.prompt)  # an identical prompt can use its first M - 1 tokens
        spans = request.spans
        ends = [span.end for span in spans if span.kind in ("system", "tools")] + [span.end for span in spans[-3:]]
        ends += [*range(_STATE_EVERY, M, _STATE_EVERY), M - 1]
        return sorted({end for end in ends if start < end < M})

    def _read_with_logprobs(self, active: ActiveRequest, model: Reader, count: int) -> PrefillSteps:
        """Run a full prefill with every row's logits. Those of 128 tokens exist at a time, and none between steps."""
        prompt, M = active.request.prompt, len(active.request.prompt)
        tokens, start = mx.array(prompt)[None], 0
        entries = []
        while start < M:
            end = min(start + self.step(), start + LOGITS_ROWS, M)
            logits: mx.array = model(tokens[:, start:end], cache=active.cache)[0]
            following = prompt[start + 1 : end + 1].tolist()
            entries += top_logprobs(log_softmax(logits)[: len(following)], following, count)
            logits = mx.contiguous(logits[-1:])
            mx.eval(logits, [part.state for part in active.cache])
            yield Progress("prefill", end, M)
            start = end
        yield PromptLogprobs(tuple(entries))
        return logits
