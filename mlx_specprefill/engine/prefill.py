"""From a request to the logits of its last prompt token, slice by slice, and the one fallback from sparse to full."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from .._steps import Steps
from ..cache.positioned import PositionedRotatingKVCache, leaves
from ..config import EngineConfig
from ..errors import RequestCancelled, device_error
from ..loading import ModelPair
from ..request import GenerationRequest, Progress, PromptLogprobs
from ..sampling import top_logprobs
from ..sessions.continuing import Beginning, Continuing
from ..sessions.repair import insert
from ..specprefill.everything import about_everything
from ..specprefill.plan import PrefillPlan
from ..specprefill.scorer import Scores, question_span
from ..specprefill.selector import PromptText, Selection, TextReader, select_tokens
from ..specprefill.sparse_prefill import prefill
from .admission.planner import Planner
from .caches import EngineCaches, empty_cache
from .scoring import DraftContextError, PromptScorer
from .sequence import Sequence
from .staged import hidden_states, read_rest, read_upper

__all__ = ["Prefiller"]

log = logging.getLogger(__name__)
Slices = Generator[Progress | PromptLogprobs, None, mx.array]
Kept = npt.NDArray[np.int32]
_OPENING = 32  # tokens of a message whose first line may be an instruction
_WORTH_KEEPING = 128  # tokens of a dense beginning, for which a forward has to end there
_STATE_EVERY = 4096  # tokens between checkpoints of state that can't be trimmed


class Prefiller:
    """Runs prefills.

    Args:
        planner: decides how a prompt is prefilled.
        slice_size: tokens for the next forward of "draft" or "prefill".

    Attributes:
        fallbacks: how often each stage of a sparse prefill failed and the request went on with a full one.
    """

    def __init__(
        self,
        pair: ModelPair,
        config: EngineConfig,
        caches: EngineCaches,
        planner: Planner,
        slice_size: Callable[[str], int],
    ) -> None:
        self.pair = pair
        self.config = config
        self.caches = caches
        self.planner = planner
        self.slice_size = slice_size
        self.text = TextReader(pair.tokenizer)
        self.scorer = PromptScorer(pair, config, caches, slice_size)
        self._continuing = Continuing(config.policy, planner.selects)
        self.fallbacks: Counter[str] = Counter()

    def run(self, sequence: Sequence) -> Slices:
        """Yields between slices, returns the logits (1, V). Throw `RequestCancelled` into it to stop."""
        request = sequence.request
        yield Progress("queued", 0, len(request.prompt))
        assert sequence.plan is not None
        if sequence.plan.mode == "sparse":
            logits = yield from self._sparse_or_full(sequence)
        else:
            self._from_prefix(sequence)
            yield Progress("prefill", 0, len(request.prompt) - sequence.cached)
            logits = yield from self._full(sequence)
        sequence.stage = "draft"
        if sequence.drafting is not None:
            yield from sequence.drafting.end(sequence.cache, sequence.kept)
        return logits

    def _from_prefix(self, sequence: Sequence, again: bool = False) -> None:
        """Start from the longest dense prefix that the exact cache holds and the request may use."""
        prompt = sequence.request.prompt
        sequence.stage = "prefill"
        limit = sequence.request.usable_prefix
        hit = self.caches.target_prefix(prompt[: limit + 1], sequence.request.label, again) if limit > 0 else None
        sequence.cached = hit.length if hit is not None else 0
        sequence.cache = hit.cache if hit is not None else empty_cache(self.pair.target)

    def _sparse_or_full(self, sequence: Sequence) -> Slices:
        try:
            self._from_prefix(sequence)
            sequence.plan = self.planner.plan(sequence.request, sequence.cached)
            if sequence.plan.mode == "sparse":
                yield Progress("draft", 0, len(sequence.request.prompt))
                logits = yield from self._sparse(sequence)
                if logits is not None:
                    return logits
            else:
                yield Progress("prefill", 0, len(sequence.request.prompt) - sequence.cached)
        except RequestCancelled:
            raise
        except Exception as error:
            if device_error(error) is not None:  # a full prefill would ask several times as much of it
                raise
            self._fall_back(sequence, error)
        return (yield from self._full(sequence))

    def _fall_back(self, sequence: Sequence, error: Exception) -> None:
        """Back to an untouched sequence, on mlx-lm's own caches: nothing that may have failed is used again."""
        assert sequence.plan is not None
        log.exception("full prefill instead of sparse: %s failed", sequence.stage)
        self.fallbacks[sequence.stage] += 1
        reason = f"fallback: {sequence.stage} failed: {type(error).__name__}: {error}"
        sequence.plan = sequence.plan.as_full(reason)
        sequence.kept, sequence.continuation, sequence.cached, sequence.reused = None, None, 0, 0
        sequence.cache, sequence.staged, sequence.hidden = list(make_prompt_cache(self.pair.target)), False, None
        mx.clear_cache()

    # --- sparse ------------------------------------------------------------------------------------------------------

    def _sparse(self, sequence: Sequence) -> Generator[Progress | PromptLogprobs, None, mx.array | None]:
        """None where all of the prompt is to be read after all: the sequence is as it was, but for its plan."""
        request = sequence.request
        assert sequence.plan is not None
        sequence.stage = "draft"
        text = self.text.read(request.prompt)
        sequence.plan = self.by_question(request, sequence.plan, text)
        if sequence.plan.mode == "full":
            return None
        sequence.hidden = hidden_states(self.pair, self.caches, sequence)
        try:
            scores = yield from self.scorer.scores(request, sequence.plan, text, sequence.hidden)
        except DraftContextError as error:
            sequence.plan = sequence.plan.as_full(error.reason)
            return None
        sequence.scorer, sequence.scoring, sequence.draft_read = scores.scorer, scores.words, scores.read
        sequence.stage = "select"
        # Chunks lie where an earlier turn's lay.
        first = sequence.cached - sequence.cached % self.config.selection_by(sequence.plan.rule).chunk_size
        selection = self.select(text, scores, sequence.plan, first)
        beginning = self._begin(sequence, selection, first)
        sequence.reused = int(beginning.held.size)
        yield Progress("select", beginning.read, len(request.prompt))
        sequence.stage = "prefill"
        if (drafting := sequence.drafting) is not None and drafting.begin(sequence.hidden is not None):
            drafting.cache, drafting.lookahead = scores.cache, scores.lookahead
        if sequence.hidden is not None:
            return (yield from read_upper(self.pair, self.caches, sequence, beginning, scores.cache, self.slice_size))
        del scores  # and with them the draft's cache, unless it is kept: the target needs the memory next
        logits = yield from self._read(sequence, beginning)
        sequence.kept = beginning.all_kept
        return logits

    def _begin(self, sequence: Sequence, selection: Selection, first: int) -> Beginning:
        """Behind an earlier sparse turn of the conversation, if there is one; own scores mean what they say."""
        request, session = sequence.request, None
        assert sequence.plan is not None
        staged = sequence.hidden is not None
        if request.specprefill.importance is None:
            earlier = request.prompt[: request.usable_prefix]
            session = self.caches.session(earlier, sequence.plan.choice, request.label, staged)
        M, S = len(request.prompt), sequence.cached
        beginning = self._continuing.begin(M, S, selection, first, session, self.config.selection.stands_out)
        sequence.continuation = beginning.continuation
        if sequence.hidden is not None and session is not None and session.hidden is not None:
            sequence.hidden.put_before(session.hidden)
        if beginning.cache is not None and not staged:
            sequence.cache = beginning.cache
        return beginning

    def by_question(self, request: GenerationRequest, plan: PrefillPlan, text: PromptText) -> PrefillPlan:
        """The plan, in full where the question is about everything, unless the request wants a sparse prefill."""
        if plan.mode == "full" or request.specprefill.enabled:
            return plan
        words = about_everything(self._asked(request, text))
        return plan if words is None else plan.as_full(f'the question is about the whole prompt ("{words}")')

    def _asked(self, request: GenerationRequest, text: PromptText) -> str:
        """What the last user message says in its first line and at its end. Tool results behind it ask nothing."""
        said = [(span.content_start, span.content_end) for span in request.spans if span.kind == "user"]
        first, end = said[-1] if said else (0, len(request.prompt))
        begin, end = question_span(len(request.prompt), self.config.scoring, end, text.units)
        decode = self.pair.tokenizer.decode
        opening = decode(request.prompt[first : min(first + _OPENING, end)].tolist()).lstrip().split("\n", 1)[0]
        return f"{opening}\n{decode(request.prompt[max(first, begin) : end].tolist())}"

    def select(self, text: PromptText, scores: Scores, plan: PrefillPlan, start: int = 0) -> Selection:
        """Of the prompt from `start` on, which is where a chunk begins; its `kept` counts from there."""
        importance, forced = scores.importance[start:], plan.forced[start:]
        return select_tokens(importance, forced, text.since(start), plan.keep, self.config.selection_by(plan.rule))

    def _read(self, sequence: Sequence, beginning: Beginning) -> Slices:
        """What is missing, then what follows; progress counts both."""
        missing, size = beginning.missing, int(beginning.missing.size)
        if size:
            steps = insert(
                self.pair.target, sequence.cache, sequence.request.prompt, missing, lambda: self.slice_size("prefill")
            )
            for progress in steps:
                yield replace(progress, total=beginning.read)
        kept = Steps(self._read_kept(sequence, beginning.start, beginning.kept))
        for progress in kept:
            yield replace(progress, done=size + progress.done, total=beginning.read)
        return kept.result

    def _read_kept(self, sequence: Sequence, start: int, kept: Kept) -> Generator[Progress, None, mx.array]:
        """Sparse prefill; the part up to the first gap is dense-exact, and a long one goes to the exact cache."""
        prompt = sequence.request.prompt
        run = int((np.arange(kept.size) == kept - start).sum()) if start == sequence.cached else 0
        run = run if run >= _WORTH_KEEPING else 0
        cuts = tuple(sorted({run, *(cut - start for cut in self._checkpoints(sequence) if start < cut < start + run)}))
        drafting = sequence.drafting
        steps = Steps(
            prefill(
                self.pair.target,
                sequence.cache,
                prompt[start:],
                kept - start,
                lambda: self.slice_size("prefill"),
                offset=start,
                cuts=cuts if run else (),
                forward=nullcontext if drafting is None else drafting.forward(kept),
                last_forward=None if drafting is None else drafting.last_forward(sequence.grammar),
            )
        )
        for progress in steps:
            if run and progress.done in cuts and progress.done < kept.size:
                self.caches.keep_target(prompt[: start + progress.done], sequence.cache, sequence.request)
            yield progress
        return steps.result

    # --- full --------------------------------------------------------------------------------------------------------

    def _full(self, sequence: Sequence) -> Slices:
        request, S = sequence.request, sequence.cached
        forward: Callable[[], AbstractContextManager[None]] = nullcontext
        if (drafting := sequence.drafting) is not None:
            if drafting.begin():
                drafting.cache = yield from self._read_with_draft(sequence)
            forward = drafting.forward(np.arange(S, len(request.prompt), dtype=np.int32))
        sequence.stage = "prefill"
        if request.prompt_logprobs is not None:
            return (yield from self._with_prompt_logprobs(sequence, request.prompt_logprobs, forward))
        cuts = [cut - S for cut in self._checkpoints(sequence) if cut > S]
        steps = Steps(
            prefill(
                self.pair.target,
                sequence.cache,
                request.prompt[S:],
                None,
                lambda: self.slice_size("prefill"),
                cuts=cuts,
                forward=forward,
            )
        )
        done = 0
        try:
            for progress in steps:
                done = progress.done
                if done in cuts[:-1]:
                    self.caches.keep_target(request.prompt[: S + done], sequence.cache, request)
                elif done in cuts:
                    sequence.unstored = self.caches.keep_target_later(
                        request.prompt[: S + done], sequence.cache, request
                    )
                yield progress
        except RequestCancelled:
            sequence.unstored = None
            if done:  # an identical retry goes on from here
                self.caches.keep_target(request.prompt[: S + done], sequence.cache, request)
            raise
        if not cuts:  # with cuts, the last one is M - 1: an identical prompt can't use the state at M
            sequence.unstored = self.caches.keep_target_later(request.prompt, sequence.cache, request)
        return steps.result

    def _read_with_draft(self, sequence: Sequence) -> Generator[Progress, None, list[Any]]:
        """Read the whole prompt, for a draft that proposes after a full prefill; its cache."""
        assert self.pair.draft is not None
        sequence.stage = "draft"
        prompt, label = sequence.request.prompt, sequence.request.label
        hit = self.caches.draft_prefix(prompt, label)
        start = hit.length if hit is not None else 0
        cache = hit.cache if hit is not None else list(make_prompt_cache(self.pair.draft))
        for progress in prefill(self.pair.draft, cache, prompt[start:], None, lambda: self.slice_size("draft")):
            yield Progress("draft", start + progress.done, len(prompt))
        self.caches.keep_draft(prompt, cache, sequence.request)
        return cache

    def dense(self, request: GenerationRequest, choice: str = "") -> Generator[Progress | PromptLogprobs, None, None]:
        """Background: bring the exact cache up to its prompt, preemptible at every slice; cancelled, it keeps them.

        Args:
            choice: `PrefillPlan.choice` of the sparse turn that this is the text of.
        """
        sequence = Sequence(-1, request, 0.0)
        self._from_prefix(sequence, again=True)
        yield from read_rest(self.pair, self.caches, sequence, choice, self.slice_size)
        if sequence.cached < len(request.prompt) - 1:
            yield from self._full(sequence)
            sequence.store()

    def _checkpoints(self, sequence: Sequence) -> list[int]:
        """Prompt lengths at which another request may branch off: only for state that can't be trimmed."""
        if not _stateful(sequence.cache):
            return []
        M = len(sequence.request.prompt)  # an identical prompt can use its first M - 1 tokens
        spans = sequence.request.spans
        ends = [span.end for span in spans if span.kind in ("system", "tools")] + [span.end for span in spans[-3:]]
        return sorted({end for end in [*ends, *range(_STATE_EVERY, M, _STATE_EVERY), M - 1] if 0 < end < M})

    def _with_prompt_logprobs(
        self, sequence: Sequence, count: int, forward: Callable[[], AbstractContextManager[None]]
    ) -> Slices:
        """Full prefill that looks at every row's logits; one slice's (L, V) float32 block is held at a time."""
        prompt, M = sequence.request.prompt, len(sequence.request.prompt)
        tokens, start = mx.array(prompt)[None], 0
        entries = []
        while start < M:
            end = min(start + self.slice_size("prefill"), M)
            with forward():
                logits: mx.array = self.pair.target(tokens[:, start:end], cache=sequence.cache)[0]
            raw = logits.astype(mx.float32)
            following = prompt[start + 1 : end + 1].tolist()
            table = (raw - mx.logsumexp(raw, axis=-1, keepdims=True))[: len(following)]
            entries += top_logprobs(table, following, count)
            yield Progress("prefill", end, M)
            start = end
        yield PromptLogprobs(tuple(entries))
        return logits[-1:]


def _stateful(cache: list[Any]) -> bool:
    """Whether some layer's state can't be cut back to an earlier length."""
    return any(isinstance(part, (ArraysCache, PositionedRotatingKVCache)) for part in leaves(cache))
