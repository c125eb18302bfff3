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

from ..arrays import Indices
from ..cache.held import HeldTokens
from ..cache.positioned import is_stateful
from ..cache.prefix.nodes import CacheHit, common_length
from ..cache.prefix.selection_key import SelectionKey
from ..config import EngineConfig
from ..errors import Refused, RequestCancelled, device_error
from ..events import Progress, PromptLogprobs
from ..loading import ModelPair
from ..prefill_report import Prediction, Reason, ReasonCode
from ..request import GenerationRequest
from ..sampling import LOGITS_ROWS, log_softmax, top_logprobs
from ..specprefill.plan import PrefillPlan, pays, plan_prefill, unless_nobody_asks
from ..specprefill.question import is_asked
from ..specprefill.scorer import Scores
from ..specprefill.selector import Selection, missing_of, select_tokens, selection_by, strongest
from ..specprefill.sparse_prefill import feed, forward_ends, recalling
from ..specprefill.text import PromptText, TextReader
from .active_request import NO_INDICES, ActiveRequest, Choice, Prefix
from .caches import EngineCaches, empty_cache
from .chunks import ChunkSizer
from .costs import CostModel
from .edited_prefix import Edit, EditedPrefixes
from .scoring import DraftContextError, Extension, PromptScorer, Scoring

log = logging.getLogger(__name__)
PrefillSteps = Generator[Progress | PromptLogprobs, None, mx.array]
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

    _scorer_type: Callable[..., PromptScorer] = PromptScorer  # `ranked.RankedPrefiller` has another

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
        self.scorer = self._scorer_type(pair, config, caches, partial(chunks.size, "draft"))
        self.edits = EditedPrefixes(pair, caches)
        words = pair.sparse_refusal
        self._refusal = None if words is None else Reason("unsupported" if pair.has_draft else "no-draft", words)
        self.fallbacks: Counter[str] = Counter()

    def plan(self, request: GenerationRequest, cached: int | None = None) -> PrefillPlan:
        """Choose a sparse or a full prefill for a request on this machine. May be called from any thread.

        Args:
            cached: tokens that the target's cache holds; None: not known yet.
        """
        pair = self.pair
        read = None if cached is None else self.caches.draft_covers(request.prompt[:-1], request.label)
        return plan_prefill(
            request,
            self.config,
            sparse_refusal=self._refusal,
            # The number of tokens for a draft with another tokenizer is known only after tokenizing.
            draft_context=pair.draft_context if pair.mapping is None else None,
            cached_tokens=cached,
            predict=partial(self.predict, len(request.prompt), cached or 0, read=read) if pair.has_draft else None,
            gains_are_known=self.config.calibration_file is not None and self._costs.are_measured,
        )

    def plan_by_text(self, request: GenerationRequest, plan: PrefillPlan) -> PrefillPlan:
        """Return the plan, as a full prefill where nobody asks for a part of a pasted text, whose lines it reads."""

        def asks() -> bool:
            text = self.text.read(request.prompt)
            return is_asked(self.scorer.ask(request, plan, text).asks, text)

        return unless_nobody_asks(plan, request, self.config.policy, asks)

    def predict(self, tokens: int, cached: int, kept: int, read: int | None = None) -> Prediction:
        """Return the times of both prefills of a prompt if the target sees `kept` of its uncached tokens.

        May be called from any thread.

        Args:
            read: tokens that the draft's cache holds; None: as many as the target's.
        """
        sizes = self._chunks.expected_tokens("prefill"), self._chunks.expected_tokens("draft")
        return self._costs.predict(tokens, kept, cached, sizes, cached if read is None else read)

    def run(self, active: ActiveRequest) -> PrefillSteps:
        """Prefill a request. If a sparse prefill fails, go on with a full one.

        Yield between prefill chunks; return the logits (1, V). Throw `RequestCancelled` into the generator to stop it.
        """
        yield Progress("queued", 0, len(active.request.prompt))
        try:
            if active.request.specprefill.enabled is None:
                active.plan = self.plan_by_text(active.request, active.plan)
            yield from self.resume(active)
            reason = self._decide(active)
            if active.prefix.miss is not None:  # else no cached prompt has much of the rest
                yield from self._reuse(active, reason)
            text, scores = None if active.way == "full" else self.text.read(active.request.prompt), None
            if text is not None and (scoring := self._scoring(active, text)) is not None:
                yield Progress("draft", 0, len(active.request.prompt))
                scores = yield from scoring
            if text is not None and active.way != "full":
                reading = yield from self._choose(active, text, scores)
                scores = None  # frees the draft's cache, unless it is kept: the target needs the memory
                logits = yield from self._read(active, reading)
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:  # a full prefill would need several times as much of the device
                raise
            self._fall_back(active, error)
        if active.way == "full":
            logits = yield from self.read_all(active)
        active.stage = "draft"
        if active.drafting is not None:
            yield from active.drafting.end(active.cache)
        return logits

    # --- the cached prefix -------------------------------------------------------------------------------------------

    def resume(self, active: ActiveRequest, again: bool = False) -> Generator[Progress, None, None]:
        """Resume from the longest cached prefix: a dense one, or a sparse one that the request's selection key accepts.

        A forced request means its newest message: of that it resumes only what another forced request chose.
        """
        request, key = active.request, active.plan.selection_key
        active.stage = "prefill"
        limit = request.usable_prefix
        if key is not None and not (key.forced and self._is_repeated(request, key)):
            key = key.unforced
        elif key is not None:
            limit = len(request.prompt) - 1
        hit = None
        if limit > 0:
            hit = yield from self.caches.target_prefix(request.prompt[: limit + 1], request.label, again, key)
        active.resume(CacheHit(0, empty_cache(self.pair.target), HeldTokens()) if hit is None else hit)
        if not again and (hit is None or not hit.is_whole):
            active.prefix = replace(active.prefix, miss=self.caches.miss(request, self.pair.tokenizer.decode))

    def _is_repeated(self, request: GenerationRequest, key: SelectionKey) -> bool:
        """Return whether the same prompt was read before with the same selection key."""
        prompt = request.prompt[:-1]
        if self.caches.covers(prompt, request.label, key) < prompt.size:
            return False
        return self.caches.covers(prompt, request.label) < prompt.size

    def _decide(self, active: ActiveRequest) -> ReasonCode:
        """Plan again, now that the cached prefix is known, and take the way. Return the plan's reason."""
        submitted = plan = active.plan
        if submitted.mode == "sparse" or submitted.selection_key is not None or submitted.predicted is not None:
            plan = self.plan(active.request, active.prefix.length)
            if submitted.mode == "full":  # the memory was reserved for a full prefill
                plan = replace(plan, mode="full", reason=submitted.reason)
        active.decide(plan)
        if active.way != "full" and active.plan.predicted is not None:
            active.plan = replace(active.plan, predicted=self._predict_ways(active, active.plan.predicted))
        return plan.reason.code

    def _reuse(self, active: ActiveRequest, planned: ReasonCode) -> Generator[Progress, None, None]:
        """Go on from a cached prompt that this one inserts text into, if the server may choose and it pays.

        It would read a part, or all only because that is sooner or nothing may be dropped, as of tools.
        """
        request, plan = active.request, active.plan
        may = self._may_reuse(active) and (active.way == "sparse" or planned in ("predicted", "forced"))
        movable = self.edits.movable(plan.selection_key) if may else None
        edit = self.edits.find(request, movable) if may else None
        if edit is None:
            return
        predicted = self._predict_edit(request, edit, plan.predicted)
        if not self._pays(edit, plan, predicted) or (edit.is_thin and _asks(request, edit.length)):
            return  # a new question chooses better anew
        hit = yield from self.edits.restore(request, edit, movable)
        if hit is None:
            return
        reason = Reason("reused", edit.words)
        active.go_on_from(hit, edit.unread, replace(plan, reason=reason, predicted=predicted))
        if edit.is_sparse and not isinstance(rotations := self.edits.layers("draft"), Refused):
            active.stage = "draft"
            read = yield from self.scorer.follow(request, edit, rotations)
            active.choice = replace(active.choice, draft_read=read)

    def _keep_around(self, active: ActiveRequest, reading: Indices) -> Generator[Progress, None, Indices]:
        """Go on from a dense cached prompt that this one changes, if that pays, with what was chosen read anew.

        Return what is then to be read.
        """
        request, plan = active.request, active.plan
        may = active.way == "sparse" and self._may_reuse(active)
        new = reading[reading >= active.prefix.length]
        edit = self.edits.find(request, None, new) if may else None
        if edit is None or common_length(edit.cached, request.prompt) < active.prefix.length:
            return reading
        pays = self._pays(edit, plan, self._predict_edit(request, edit, plan.predicted))
        hit = (yield from self.edits.restore(request, edit, None)) if pays else None
        if hit is None:
            return reading
        active.go_on_from(hit, edit.unread, replace(plan, reason=Reason("reused", edit.words)))
        return np.concatenate([edit.unread, edit.later])

    def _may_reuse(self, active: ActiveRequest) -> bool:
        """Return whether the request leaves the way to the server, and the server reuses."""
        key = active.plan.selection_key
        if not self.config.policy.reuse or active.request.specprefill.keep_pct is not None:
            return False
        return key is not None and not key.forced and key.rule == "default"

    def _predict_edit(self, request: GenerationRequest, edit: Edit, planned: Prediction | None) -> Prediction | None:
        """Return the time of full reading, and of reading what an edit has to read; None if not known."""
        if planned is None:
            return None
        M = len(request.prompt)
        drafted = edit.inserted + (M - edit.length if _asks(request, edit.length) else 0)
        ways = self.predict(M, M - edit.read, edit.read, M - drafted)
        return replace(planned, sparse_ms=ways.sparse_ms if edit.is_sparse else ways.full_ms)

    def _pays(self, edit: Edit, plan: PrefillPlan, predicted: Prediction | None) -> bool:
        """Return whether an edit is read soon enough: it loses less than a sparse prefill, so half the time will do,
        but where it keeps no more than a sparse prefill does.
        """
        if plan.predicted is None or predicted is None:
            return edit.reused >= edit.read
        if plan.mode == "full":
            return pays(predicted, self.config.policy)
        return predicted.sparse_ms <= max(plan.predicted.sparse_ms, 0 if edit.is_sparse else predicted.full_ms / 2)

    def _predict_ways(self, active: ActiveRequest, planned: Prediction) -> Prediction:
        """Return the time of the way taken, and that of full reading, which finds other prefixes: all dense ones."""
        prompt, L = active.request.prompt, active.prefix.length
        dense = self.caches.covers(prompt[:-1], active.request.label)
        taken = planned.sparse_ms
        if active.way == "extend":
            asking = len(prompt) - self.config.scoring.question_rows[1]
            new = self.predict(len(prompt), L, len(prompt) - L, max(L, asking))
            taken = new.sparse_ms if self._is_scored(active) else new.full_ms
        return Prediction(self.predict(len(prompt), dense, 0).full_ms, taken)

    def _fall_back(self, active: ActiveRequest, error: Exception) -> None:
        """Reset the request with mlx-lm's own caches: nothing that may have failed is used again."""
        log.exception("full prefill instead of sparse: %s failed", active.stage)
        self.fallbacks[active.stage] += 1
        reason = f"fallback: {active.stage} failed: {type(error).__name__}: {error}"
        active.cache, active.prefix = list(make_prompt_cache(self.pair.target)), Prefix(miss=active.prefix.miss)
        active.choice = replace(active.choice, kept=NO_INDICES, recalled=0)
        active.decide(replace(active.plan.as_full("fallback", reason), selection_key=None))
        mx.clear_cache()

    # --- sparse ------------------------------------------------------------------------------------------------------

    def _is_scored(self, active: ActiveRequest) -> bool:
        """Return whether the draft scores the prompt: new text may be dropped, or dropped text recalled."""
        if active.way != "extend":
            return active.way == "sparse"
        may_recall = active.prefix.missing.size > 0 and _asks(active.request, active.prefix.length)
        return self.pair.has_draft and may_recall

    def _scoring(self, active: ActiveRequest, text: PromptText) -> Scoring | None:
        """Return the steps of the draft, if it scores the prompt. Where that is too long, all of it is read."""
        if not self._is_scored(active):
            return None
        active.plan, active.stage = self.scorer.ask(active.request, active.plan, text), "draft"
        L, dropped = active.prefix.length, active.prefix.missing
        extension = Extension(L, int(dropped[-1]) + 1) if active.way == "extend" else None
        try:
            return self.scorer.scores(active.request, active.plan, text, extension)
        except DraftContextError as error:
            active.decide(active.plan.as_full("draft-context", str(error)))
            return None

    def _choose(
        self, active: ActiveRequest, text: PromptText, scores: Scores | None
    ) -> Generator[Progress, None, Indices]:
        """Return the prompt indices of the tokens to read, ascending. The first may be recalled ones of the prefix."""
        if scores is not None:
            active.choice = Choice(scores.scorer, scores.words, scores.read + active.choice.draft_read)
        reading = self._select(active, text, scores)
        if active.prefix.miss is not None:
            reading = yield from self._keep_around(active, reading)
        yield Progress("select", reading.size, len(active.request.prompt))
        yield from self._begin_drafting(active, scores)
        return reading

    def _select(self, active: ActiveRequest, text: PromptText, scores: Scores | None) -> Indices:
        """Return the indices of dropped tokens to recall, and of new tokens to read, ascending."""
        plan, L, M = active.plan, active.prefix.length, len(active.request.prompt)
        active.stage = "select"
        recalled, new = active.prefix.unread, np.arange(L, M, dtype=np.int32)
        if scores is not None and active.prefix.held.size and _asks(active.request, L):
            held = np.concatenate([active.prefix.held, recalled])
            recalled = np.union1d(recalled, self._select_recalled(held, L, plan, scores, text))
        if active.way == "sparse" and scores is not None:
            # Chunks start where an earlier turn's chunks start.
            first = L - L % selection_by(plan.rule, self.config.selection).chunk_size
            selection = self.select(text, scores, plan, first)
            new = selection.kept[selection.kept >= L - first] + np.int32(first)
        return np.concatenate([recalled, new])

    def _select_recalled(self, held: Indices, L: int, plan: PrefillPlan, scores: Scores, text: PromptText) -> Indices:
        """Return the dropped tokens among the first L that the question needs: their scores stand out."""
        L = min(L, scores.importance.size)  # the others are held
        held = held[held < L]
        is_held = np.zeros(L, dtype=np.bool_)
        is_held[held] = True
        selection = self.select(text, scores, plan, 0, L)
        missing = missing_of(selection, is_held, self.config.selection.stands_out)
        most = max(_LEAST_RECALL, int(self.config.policy.recall_share * selection.kept.size))
        return strongest(missing, selection.token_scores, most)

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

    def select(
        self, text: PromptText, scores: Scores, plan: PrefillPlan, start: int = 0, end: int | None = None
    ) -> Selection:
        """Select tokens from `start` (a chunk's start) to `end`. The result's `kept` counts from `start`."""
        importance, forced = scores.importance[start:end], plan.forced[start:end]
        part = text.part(start, start + importance.size)
        return select_tokens(importance, forced, part, plan.keep, selection_by(plan.rule, self.config.selection))

    def _read(self, active: ActiveRequest, reading: Indices) -> PrefillSteps:
        """Prefill tokens behind the cached prefix: first those that are recalled, then those that follow it."""
        active.stage, cache = "prefill", active.cache
        held, prompt, L = active.prefix.held, active.request.prompt, active.prefix.length
        recalled, new = reading[reading < L], reading[reading >= L]
        held = held if held.size else np.arange(L, dtype=np.int32)
        kept = np.concatenate([np.sort(np.concatenate([held, recalled])), new])
        active.choice = replace(active.choice, kept=kept, recalled=int(recalled.size))
        if recalled.size:
            with recalling(cache):
                ends = forward_ends(recalled.size, self.step, tail=0)
                for done, _ in feed(self.pair.target, cache, prompt[recalled], recalled, ends):
                    yield Progress("prefill", done, reading.size)
            self.edits.settle(cache, active.prefix)
        return (yield from self._feed(active, new))

    def _feed(self, active: ActiveRequest, kept: Indices | None = None) -> PrefillSteps:
        """Feed what is behind the cached prefix, and store the cache at each stop.

        Cancelled, a full prefill keeps its chunks: a retry resumes from there.

        Args:
            kept: prompt indices of the tokens to feed, ascending; None: all of them.
        """
        start, before, fed = active.prefix.length, active.choice.recalled, 0
        indices = np.arange(start, len(active.request.prompt), dtype=np.int32) if kept is None else kept
        stops = self._stops(active, kept)
        model, tokens = _read_along(active, self.pair.target, indices), active.request.prompt[indices]
        ends = forward_ends(indices.size, self.step, tuple(stops))
        try:
            for fed, logits in feed(model, active.cache, tokens, kept, ends, logits=True):  # noqa: B007
                if fed in stops:  # nearly all of the prompt is stored once the first token is out
                    later = stops[fed] >= len(active.request.prompt) - 1
                    active.keep_prompt(self.caches, stops[fed], later)
                yield Progress("prefill", before + fed, before + indices.size)
        except RequestCancelled:
            if fed and kept is None:
                active.keep_prompt(self.caches, start + fed)
            raise
        assert logits is not None, "the last token's were asked for"
        return logits

    def _stops(self, active: ActiveRequest, new: Indices | None) -> dict[int, int]:
        """Return the counts of new tokens after which a forward ends, ascending, and the length that the cache then
        holds.
        """
        if new is None:  # an identical prompt can't use a state at its end: the last checkpoint is one token before it
            ends = self.checkpoints(active.request, active.prefix.length) or [len(active.request.prompt)]
            return {end - active.prefix.length: end for end in ends}
        if active.plan.selection_key is None:
            return {}
        if not self.is_stateful:
            return {new.size: len(active.request.prompt)}
        ends = self.checkpoints(active.request, active.prefix.length)
        counts = {int(np.searchsorted(new, length)): length for length in ends}
        dense = common_length(new, active.prefix.length + np.arange(new.size, dtype=np.int32))
        if not active.prefix.held.size and dense >= _LEAST_CHECKPOINT:
            counts[dense] = active.prefix.length + dense
        return {count: counts[count] for count in sorted(counts) if 0 < count < new.size}

    # --- full --------------------------------------------------------------------------------------------------------

    def read_all(self, active: ActiveRequest) -> PrefillSteps:
        """Prefill the whole prompt behind a dense prefix."""
        request, S = active.request, active.prefix.length
        yield Progress("prefill", 0, len(request.prompt) - S, cached=S)
        yield from self._begin_drafting(active, None)
        active.stage = "prefill"
        if request.prompt_logprobs is None:
            return (yield from self._feed(active))
        return (yield from self._with_prompt_logprobs(active, request.prompt_logprobs))

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

    def _with_prompt_logprobs(self, active: ActiveRequest, count: int) -> PrefillSteps:
        """Run a full prefill with every row's logits. Those of 128 tokens exist at a time, and none between steps."""
        prompt, M = active.request.prompt, len(active.request.prompt)
        tokens, start = mx.array(prompt)[None], 0
        entries, model = [], _read_along(active, self.pair.target, np.arange(M, dtype=np.int32))
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


def _read_along(active: ActiveRequest, model: Callable[..., mx.array], fed: Indices) -> Callable[..., mx.array]:
    """Return the model that reads the prompt indices `fed` as what drafts the answer runs it."""
    proposer = None if active.drafting is None else active.drafting.proposer
    return model if proposer is None else proposer.read_along(model, fed)


def _asks(request: GenerationRequest, start: int) -> bool:
    """Return whether a user message follows the prompt's first `start` tokens: tool results ask nothing, and neither
    does a prompt that was read before.
    """
    if start == len(request.prompt) - 1:
        return False
    return not request.spans or any(span.kind == "user" and span.content_end > start for span in request.spans)
