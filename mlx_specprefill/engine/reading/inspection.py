"""Inspections, which show the draft's view of a prompt, and replays of a given continuation, to measure quality."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...adapters.rotation import adjust_offsets
from ...arrays import Floats
from ...choosing.sampling import LOGITS_ROWS, log_softmax
from ...events import Event, Progress
from ...prefill_report import Mode, Prediction, PrefillReport
from ...request import GenerationRequest, concat_tokens
from ...selection.selector import kept_spans, select_part, selection_by
from ..requests.active_request import ActiveRequest
from .prefill import Prefiller


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """One chunk of the prompt, [start, end), and whether it is kept."""

    index: int
    start: int
    end: int
    score: float
    forced: bool
    kept: bool
    kept_tokens: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The draft's view of a prompt.

    Attributes:
        importance: float32 (M,).
        forced_ranges: prompt indices [start, end) and the rule that keeps each range; ranges may overlap.
        asking: prompt indices [start, end) of the lines whose attention gives the importance; they may overlap. Empty
            if other scores count.
        kept_spans: the tokens that the target would see, as maximal [start, end).
        predicted: times to first token of both prefills with empty caches; None before any measurement.
    """

    mode: Mode
    reason: str
    prompt_tokens: int
    kept_tokens: int
    importance: Floats
    chunks: tuple[ChunkInfo, ...]
    forced_ranges: tuple[tuple[int, int, str], ...]
    kept_spans: tuple[tuple[int, int], ...] = ()
    asking: tuple[tuple[int, int], ...] = ()
    predicted: Prediction | None = None


def inspect_prompt(prefiller: Prefiller, request: GenerationRequest) -> Generator[Progress, None, Inspection]:
    """Plan, score and select. The selection is shown even where the plan is a full prefill; `reason` says why.

    Raises:
        SparseUnsupportedError: there is no draft, or it can't score.
    """
    yield Progress("queued", 0, len(request.prompt))
    text = prefiller.scorer.text.read(request.prompt)
    plan = prefiller.planner.plan(request, 0)
    scores = yield from prefiller.scorer.scores(request, plan, text)
    plan = plan.asking(scores.asking(1))
    by = selection_by(plan.rule, prefiller.config.selection)
    selection = select_part(scores.importance, plan.forced, text, plan.keep, by)
    size, M = selection.chunk_size, len(request.prompt)
    starts = np.arange(0, M, size)
    kept = np.zeros(M, dtype=np.int64)
    kept[selection.kept] = 1
    counts = np.add.reduceat(kept, starts)
    chunks = tuple(
        ChunkInfo(
            index=i,
            start=int(start),
            end=min(int(start) + size, M),
            score=float(selection.chunk_scores[i]),
            forced=bool(selection.chunk_forced[i]),
            kept=bool(selection.chunk_chosen[i] or selection.chunk_forced[i]),
            kept_tokens=int(counts[i]),
        )
        for i, start in enumerate(starts)
    )
    ranges = tuple((r.start, r.end, r.reason) for r in plan.ranges)
    return Inspection(
        mode=plan.mode,
        reason=plan.reason.words,
        prompt_tokens=M,
        kept_tokens=int(selection.kept.size),
        importance=scores.importance,
        chunks=chunks,
        forced_ranges=ranges,
        kept_spans=kept_spans(selection.kept),
        asking=prefiller.scorer.asking(request, plan, text, scores),
        predicted=plan.predicted,
    )


@dataclass(frozen=True, slots=True)
class Replay:
    """A continuation of T tokens under teacher forcing.

    Attributes:
        logprobs: float32 (T, V), natural logarithm; row t is the distribution from which token t would have been drawn.
        report: of the prefill, with its kept spans.
    """

    logprobs: Floats
    report: PrefillReport


def replay_continuation(
    prefiller: Prefiller, request: GenerationRequest, continuation: tuple[int, ...], keep: bool = False
) -> Generator[Event, None, Replay]:
    """Prefill, then let the target read the continuation. Yields between prefill chunks."""
    active = ActiveRequest(-1, request, prefiller.planner.plan(request))
    logits = yield from prefiller.run(active)
    active.store()
    read, rows = continuation[:-1], [np.array(log_softmax(logits))]
    for start in range(0, len(read), LOGITS_ROWS):
        part = mx.array(read[start : start + LOGITS_ROWS])
        with adjust_offsets([active.decoded.shift]):
            rows.append(np.array(log_softmax(prefiller.pair.target(part[None], cache=active.cache)[0])))
    if keep and active.decoded.shift == 0:
        active.keep(prefiller.caches, concat_tokens(request.prompt, read), active.cache)
    return Replay(np.concatenate(rows), active.report())
