"""Prefills a prompt, chunk by chunk: the cached prefix, the choice of tokens, what is stored, the fallback to full."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from ..cache.positioned import is_stateful
from ..cache.prefix.nodes import CacheHit, Fed
from ..cache.prefix.tree import finish
from ..config import EngineConfig
from ..errors import RequestCancelled, device_error
from ..events import Prediction, Progress, PromptLogprobs
from ..loading import ModelPair
from ..request import GenerationRequest
from ..sampling import LOGITS_ROWS, log_softmax, top_logprobs
from ..specprefill.plan import PrefillPlan, plan_prefill
from ..specprefill.question import question_span
from ..specprefill.scorer import Scores
from ..specprefill.selector import Selection, missing_of, select_tokens, selection_by, strongest
from ..specprefill.sparse_prefill import HiddenStates, UpperLayersModel, prefill, recall
from ..specprefill.text import PromptText, TextReader
from .caches import EngineCaches, empty_cache
from .chunks import ChunkSizer
from .costs import CostModel
from .scoring import DraftContextError, PromptScorer
from .sequence import NO_INDICES, Sequence

log = logging.getLogger(__name__)
Kept = npt.NDArray[np.int32]
Model = Callable[..., mx.array]
PrefillSteps = Generator[Progress | PromptLogprobs, None, mx.array]
_FORCED = ":forced"  # ends the selection key of a request that forces a sparse prefill
_OPENING = 32  # tokens of a message whose first line may be an instruction
_LEAST_RECALL = 256  # tokens that may always be recalled
_LEAST_CHECKPOINT = 128  # tokens of a dense beginning that is worth a forward end
_STATE_EVERY = 4096  # tokens between checkpoints of state that can't be trimmed


class Prefiller:
    """Plans and runs prefills.

    Args:
        costs: predicts their times.
        chunks: sizes their chunks.

    Attributes:
        fallbacks: how often each stage of a sparse prefill failed and the request went on with a full one.
    """

    def __init__(
        self, pair: ModelPair, config: EngineConfig, caches: EngineCaches, costs: CostModel, chunks: ChunkSizer
    ) -> None:
        self.pair = pair
        self.config = config
        self.caches = caches
        self._costs = costs
        self._chunks = chunks
        self.step = partial(chunks.size, "prefill")  # tokens of the target's next forward
        self.is_stateful = is_stateful(empty_cache(pair.target))
        self.text = TextReader(pair.tokenizer)
        self.scorer = self._make_scorer(pair, config, caches, partial(chunks.size, "draft"))
        self.fallbacks: Counter[str] = Counter()

    def _make_scorer(self, *parts: Any) -> PromptScorer:
        return PromptScorer(*parts)

    def plan(self, request: GenerationRequest, cached: int | None = None) -> PrefillPlan:
        """Choose a sparse or a full prefill for a request on this machine. May be called from any thread.

        Args:
            cached: tokens that the target's cache holds; None: not known yet.
        """
        pair = self.pair
        return plan_prefill(
            request,
            self.config,
            sparse_refusal=pair.sparse_refusal,
            # The number of tokens for a draft with another tokenizer is known only after tokenizing.
            draft_context=pair.draft_context if pair.mapping is None else None,
            cached_tokens=cached,
            predict=partial(self.predict, len(request.prompt), cached or 0) if self.pair.has_draft else None,
            question=partial(self.question_text, request),
        )

    def question_text(self, request: GenerationRequest) -> str:
        """Return the first line and the last line or sentence of the last user message. May be called from any thread.

        Tool results behind it hold no question.
        """
        said = [(span.content_start, span.content_end) for span in request.spans if span.kind == "user"]
        first, end = said[-1] if said else (0, len(request.prompt))
        most = max(first, end - self.config.scoring.question_rows[1])  # the question begins no earlier
        units = self.text.read(request.prompt[most:end]).units + np.int32(most)
        begin, end = question_span(len(request.prompt), self.config.scoring, end, units)
        decode = self.pair.tokenizer.decode
        opening = decode(request.prompt[first : min(first + _OPENING, end)].tolist()).lstrip().split("\n", 1)[0]
        return f"{opening}\n{decode(request.prompt[max(first, begin) : end].tolist())}"

    def predict(self, tokens: int, cached: int, kept: int) -> Prediction:
        """Return the times of both prefills of a prompt if the target sees `kept` of its uncached tokens.

        The draft's cache is assumed to hold the same prefix as the target's. May be called from any thread.
        """
        sizes = self._chunks.expected_tokens("prefill"), self._chunks.expected_tokens("draft")
        return self._costs.predict(tokens, kept, cached, sizes)

    def run(self, sequence: Sequence) -> PrefillSteps:
        """Prefill a request. If a sparse prefill fails, go on with a full one.

        Yield between prefill chunks; return the logits (1, V). Throw `RequestCancelled` into the generator to stop it.
        """
        prompt = sequence.request.prompt
        yield Progress("queued", 0, prompt.size)
        try:
            yield from self.resume(sequence)
            self._replan(sequence)
            scores: Scores | None = None
            if not sequence.reads_all:
                text = self.text.read(prompt)
                scores = yield from self._score(sequence, text)
            if not sequence.reads_all:
                recalled, new = self._select(sequence, text, scores)
                yield Progress("select", recalled.size + new.size, prompt.size)
                yield from self._begin_drafting(sequence, scores)
                scores = None  # frees the draft's cache, unless it is kept: the target needs the memory
                model, cache = yield from self._recall(sequence, recalled, new)
                logits = yield from self._feed(sequence, model, cache, new)
                if sequence.staged is not None:
                    sequence.staged.unite(sequence.cache, np.setdiff1d(sequence.kept, recalled))
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:  # a full prefill would need several times as much of the device
                raise
            self._fall_back(sequence, error)
            scores = None
        if sequence.reads_all:
            logits = yield from self.read_all(sequence)
        sequence.stage = "draft"
        if sequence.drafting is not None:
            yield from sequence.drafting.end(sequence.cache)
        return logits

    # --- the cached prefix -------------------------------------------------------------------------------------------

    def resume(self, sequence: Sequence, again: bool = False) -> Generator[Progress, None, None]:
        """Resume from the longest cached prefix: a dense one, or a sparse one with this request's selection key.

        A forced request means its newest message: of that it resumes only what another forced request chose.
        """
        request, label, selection_key = sequence.request, sequence.request.label, sequence.plan.selection_key
        sequence.stage = "prefill"
        if selection_key is not None:
            selection_key += "staged" if self._is_staged(sequence) else "whole"
        limit, last = request.usable_prefix, len(request.prompt) - 1
        sequence.selection_key = selection_key
        if selection_key is not None and request.specprefill.enabled:
            sequence.selection_key = f"{selection_key}{_FORCED}"
            if self._is_repeated(request, sequence.selection_key):
                limit, selection_key = last, sequence.selection_key
        hit = None
        if limit > 0:
            hit = yield from self.caches.target_prefix(request.prompt[: limit + 1], label, again, selection_key)
        sequence.resume(CacheHit(0, empty_cache(self.pair.target)) if hit is None else hit)
        if not again and (hit is None or not hit.is_whole):
            sequence.miss = self.caches.miss(request, self.pair.tokenizer.decode)

    def _is_repeated(self, request: GenerationRequest, selection_key: str) -> bool:
        """Return whether the same prompt was read before with the same selection key."""
        prompt = request.prompt[:-1]
        if self.caches.covers(prompt, request.label, selection_key) < prompt.size:
            return False
        return self.caches.covers(prompt, request.label) < prompt.size

    def _is_staged(self, sequence: Sequence) -> bool:
        """Return whether the target's own first layers score the prompt.

        The paper's rule looks ahead with all layers, and a request with its own scores needs no scoring.
        """
        own = sequence.request.specprefill.importance
        return self.pair.stages is not None and sequence.plan.rule != "paper" and own is None

    def _fall_back(self, sequence: Sequence, error: Exception) -> None:
        """Reset the sequence with mlx-lm's own caches: nothing that may have failed is used again."""
        log.exception("full prefill instead of sparse: %s failed", sequence.stage)
        self.fallbacks[sequence.stage] += 1
        reason = f"fallback: {sequence.stage} failed: {type(error).__name__}: {error}"
        sequence.plan, sequence.selection_key = sequence.plan.as_full(reason), None
        sequence.resume(CacheHit(0, list(make_prompt_cache(self.pair.target))))
        sequence.kept, sequence.staged, sequence.hidden, sequence.recalled = NO_INDICES, None, HiddenStates(), 0
        mx.clear_cache()

    # --- sparse ------------------------------------------------------------------------------------------------------

    def _replan(self, sequence: Sequence) -> None:
        """Plan again, now that the cached prefix is known."""
        submitted = sequence.plan
        if submitted.mode == "full" and submitted.selection_key is None:
            return
        plan = self.plan(sequence.request, sequence.cached)
        if submitted.mode == "full":  # the memory was reserved for a full prefill
            plan = plan.as_full(submitted.reason)
        sequence.plan = plan

    def _score(self, sequence: Sequence, text: PromptText) -> Generator[Progress, None, Scores | None]:
        """Score the prompt with the draft; None if nothing is chosen by scores, or it is too long for it."""
        request = sequence.request
        plan = sequence.plan
        if not self._may_choose(sequence):
            return None
        yield Progress("draft", 0, len(request.prompt))
        sequence.stage = "draft"
        hidden = None
        if self._is_staged(sequence):
            parts = sequence.cached_dense, sequence.cached, sequence.hidden_parts, self._dense_ends(sequence)
            hidden = sequence.hidden = HiddenStates(*parts)
            sequence.staged = self.pair.stages
        try:
            scores = yield from self.scorer.scores(request, plan, text, hidden)
        except DraftContextError as error:
            sequence.plan = plan.as_full(str(error))
            return None
        sequence.scorer, sequence.scoring, sequence.draft_read = scores.scorer, scores.words, scores.read
        if (model := sequence.staged) is not None:
            sequence.cache = model.join(scores.cache, model.split(sequence.cache)[1])
        return scores

    def _may_choose(self, sequence: Sequence) -> bool:
        """Return whether the draft scores the prompt: new text may be dropped, or dropped text recalled."""
        if sequence.plan.mode == "sparse" or not self.pair.has_draft:
            return sequence.plan.mode == "sparse"
        return self._is_staged(sequence) or _asks(sequence.request, sequence.cached)

    def _select(self, sequence: Sequence, text: PromptText, scores: Scores | None) -> tuple[Kept, Kept]:
        """Return the prompt indices of dropped tokens to recall, and of new tokens to read. Both ascend."""
        request, plan, L, M = sequence.request, sequence.plan, sequence.cached, len(sequence.request.prompt)
        sequence.stage = "select"
        recalled, new = NO_INDICES, np.arange(L, M, dtype=np.int32)
        if scores is not None and sequence.held.size and _asks(request, L):
            recalled = self._select_recalled(sequence.held, L, plan, scores, text)
        if plan.mode == "full":
            reason = f"{M - L} new tokens are read whole behind an earlier turn: {plan.reason}"
            sequence.plan = replace(plan, mode="sparse", reason=reason)
        elif scores is not None:
            # Chunks start where an earlier turn's chunks start.
            first = L - L % selection_by(plan.rule, self.config.selection).chunk_size
            selection = self.select(text, scores, plan, first)
            new = selection.kept[selection.kept >= L - first] + np.int32(first)
        return recalled, new

    def _select_recalled(self, held: Kept, L: int, plan: PrefillPlan, scores: Scores, text: PromptText) -> Kept:
        """Return the dropped tokens among the first L that the question needs: their scores stand out."""
        is_held = np.zeros(L, dtype=np.bool_)
        is_held[held] = True
        selection = self.select(text, scores, plan, 0, L)
        missing = missing_of(selection, is_held, self.config.selection.stands_out)
        most = max(_LEAST_RECALL, int(self.config.policy.recall_share * selection.kept.size))
        return strongest(missing, selection.asked, most)

    def _begin_drafting(self, sequence: Sequence, scores: Scores | None) -> Generator[Progress, None, None]:
        """Prepare the draft to propose the answer from the cache of its scoring, if it will."""
        drafting = sequence.drafting
        draft = None if drafting is None else drafting.begin(sequence.staged is not None)
        if drafting is not None and draft is not None:
            if scores is None:
                sequence.stage = "draft"
                drafting.cache = yield from self.scorer.read(draft, sequence.request)
            else:
                drafting.cache = scores.cache

    def select(
        self, text: PromptText, scores: Scores, plan: PrefillPlan, start: int = 0, end: int | None = None
    ) -> Selection:
        """Select tokens from `start` (a chunk's start) to `end`. The result's `kept` counts from `start`."""
        importance, forced = scores.importance[start:end], plan.forced[start:end]
        part = text.part(start, start + importance.size)
        return select_tokens(importance, forced, part, plan.keep, selection_by(plan.rule, self.config.selection))

    def _recall(
        self, sequence: Sequence, recalled: Kept, new: Kept
    ) -> Generator[Progress, None, tuple[Model, list[Any]]]:
        """Prefill recalled tokens behind the cached prefix; return the model that goes on, and its cache."""
        sequence.stage = "prefill"
        model, cache = self._model(sequence, np.concatenate([recalled, new]))
        held = sequence.held if sequence.held.size else np.arange(sequence.cached, dtype=np.int32)
        sequence.kept = np.concatenate([np.sort(np.concatenate([held, recalled])), new])
        sequence.recalled = int(recalled.size)
        for progress in recall(model, cache, sequence.request.prompt, recalled, self.step):
            yield replace(progress, total=progress.total + new.size)
        return model, cache

    def _feed(self, sequence: Sequence, model: Model, cache: list[Any], kept: Kept | None = None) -> PrefillSteps:
        """Feed what is behind the cached prefix, and store the cache at each stop.

        Cancelled, a full prefill keeps its chunks: a retry resumes from there.

        Args:
            kept: prompt indices of the tokens to feed, ascending; None: all of them.
        """
        prompt, start, done = sequence.request.prompt, sequence.cached, 0
        stops = self._stops(sequence, kept)
        forward: Callable[[], AbstractContextManager[None]] = nullcontext
        if (drafting := sequence.drafting) is not None:
            forward = drafting.forward(np.arange(start, prompt.size, dtype=np.int32) if kept is None else kept)

        def store(fed: int) -> None:
            length = stops.get(fed, start + fed)
            if length in sequence.hidden.cuts:
                self._keep_staged_beginning(sequence, length)
            else:
                sequence.keep_prompt(self.caches, length, later=length >= prompt.size - 1)

        def on_forward(fed: int) -> None:
            nonlocal done
            done = fed
            if fed in stops:
                store(fed)

        try:
            return (
                yield from prefill(
                    model,
                    cache,
                    prompt[start:],
                    None if kept is None else kept - start,
                    self.step,
                    offset=start,
                    cuts=tuple(stops),
                    forward=forward,
                    on_forward=on_forward,
                    before=sequence.recalled,
                )
            )
        except RequestCancelled:
            if done and kept is None:
                store(done)
            raise

    def _model(self, sequence: Sequence, indices: Kept) -> tuple[Model, list[Any]]:
        """Return the model that reads the prompt's tokens at these indices, in this order, and its cache.

        In a staged prefill these are the upper layers.
        """
        stages = sequence.staged
        if stages is None:
            return self.pair.target, sequence.cache
        _, cache = stages.split(sequence.cache)
        states = sequence.hidden.of(indices)
        mx.eval(states)
        if not self.caches.enabled:  # else a later turn may want what this one drops
            sequence.hidden.clear()
        return UpperLayersModel(stages.upper, states), cache

    def _stops(self, sequence: Sequence, new: Kept | None) -> dict[int, int]:
        """Return the counts of new tokens after which a forward ends, ascending, and the length that the cache then
        holds.
        """
        if new is None:  # an identical prompt can't use a state at its end: the last checkpoint is one token before it
            ends = self._checkpoints(sequence) or [len(sequence.request.prompt)]
            return {end - sequence.cached: end for end in ends}
        if sequence.selection_key is None:
            return {}
        if not self.is_stateful:
            return {new.size: len(sequence.request.prompt)}
        ends = [*self._checkpoints(sequence), *sequence.hidden.cuts]
        counts = {int(np.searchsorted(new, length)): length for length in ends}
        dense = Fed(new - sequence.cached).dense_tokens
        if sequence.staged is None and not sequence.held.size and dense >= _LEAST_CHECKPOINT:
            counts[dense] = sequence.cached + dense
        return {count: counts[count] for count in sorted(counts) if 0 < count < new.size}

    def _dense_ends(self, sequence: Sequence) -> list[int]:
        """Return the lengths behind a dense prefix at which another request may branch off before the first gap.

        Empty for a cache that can be cut at any length. What is forced is known before the first layers read the
        prompt, which have to end a forward there.
        """
        if sequence.held.size or not self.is_stateful:
            return []
        start = sequence.cached
        dense = int(np.argmin(np.append(sequence.plan.forced[start:-1], False)))
        ends = [end for end in self._checkpoints(sequence) if end <= start + dense]
        return sorted({*ends, start + dense}) if dense >= _LEAST_CHECKPOINT else ends

    def _keep_staged_beginning(self, sequence: Sequence, length: int) -> None:
        """Cache a dense beginning for dense requests, with what the draft's prefixes hold of the first layers.

        These have read on by now, and no windows or states can go back.
        """
        request, stages = sequence.request, sequence.staged
        lower = finish(self.caches.draft_prefix(request.prompt[: length + 1], request.label, again=True))
        if stages is not None and lower is not None and lower.length == length:
            cache = stages.join(lower.cache, stages.split(sequence.cache)[1])
            self.caches.keep_target(request.prompt[:length], cache, request)

    # --- full --------------------------------------------------------------------------------------------------------

    def read_all(self, sequence: Sequence) -> PrefillSteps:
        """Prefill the whole prompt behind a dense prefix."""
        request, S = sequence.request, sequence.cached
        yield Progress("prefill", 0, len(request.prompt) - S, cached=S)
        yield from self._begin_drafting(sequence, None)
        sequence.stage = "prefill"
        if request.prompt_logprobs is None:
            return (yield from self._feed(sequence, self.pair.target, sequence.cache))
        return (yield from self._with_prompt_logprobs(sequence, request.prompt_logprobs))

    def _checkpoints(self, sequence: Sequence) -> list[int]:
        """Return the lengths behind the cached prefix at which another request may branch off, ascending.

        Empty for a cache that can be cut at any length.
        """
        if not self.is_stateful:
            return []
        M = len(sequence.request.prompt)  # an identical prompt can use its first M - 1 tokens
        spans = sequence.request.spans
        ends = [span.end for span in spans if span.kind in ("system", "tools")] + [span.end for span in spans[-3:]]
        ends += [*range(_STATE_EVERY, M, _STATE_EVERY), M - 1]
        return sorted({end for end in ends if sequence.cached < end < M})

    def _with_prompt_logprobs(self, sequence: Sequence, count: int) -> PrefillSteps:
        """Run a full prefill with every row's logits. Those of 128 tokens exist at a time, and none between steps."""
        prompt, M = sequence.request.prompt, len(sequence.request.prompt)
        tokens, start = mx.array(prompt)[None], 0
        entries, drafting = [], sequence.drafting
        forward = nullcontext if drafting is None else drafting.forward(np.arange(M, dtype=np.int32))
        while start < M:
            end = min(start + self.step(), start + LOGITS_ROWS, M)
            with forward():
                logits: mx.array = self.pair.target(tokens[:, start:end], cache=sequence.cache)[0]
            following = prompt[start + 1 : end + 1].tolist()
            entries += top_logprobs(log_softmax(logits)[: len(following)], following, count)
            logits = mx.contiguous(logits[-1:])
            mx.eval(logits, [part.state for part in sequence.cache])
            yield Progress("prefill", end, M)
            start = end
        yield PromptLogprobs(tuple(entries))
        return logits


def _asks(request: GenerationRequest, start: int) -> bool:
    """Return whether a user message follows the prompt's first `start` tokens: tool results ask nothing, and neither
    does a prompt that was read before.
    """
    if start == len(request.prompt) - 1:
        return False
    return not request.spans or any(span.kind == "user" and span.content_end > start for span in request.spans)
