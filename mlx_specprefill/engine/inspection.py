"""Shows the draft's view of a prompt, chunk by chunk, without running the target."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..request import GenerationRequest, Mode, Prediction, Progress
from ..specprefill.selector import kept_spans
from .prefill import Prefiller

__all__ = ["ChunkInfo", "Inspection", "inspect_prompt"]


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
        kept_spans: the tokens that the target would see, as maximal [start, end).
        predicted: times to first token of both prefills with empty caches; None before any measurement.
    """

    mode: Mode
    reason: str
    prompt_tokens: int
    kept_tokens: int
    importance: npt.NDArray[np.float32]
    chunks: tuple[ChunkInfo, ...]
    lookahead_tokens: tuple[int, ...]
    forced_ranges: tuple[tuple[int, int, str], ...]
    kept_spans: tuple[tuple[int, int], ...] = ()
    predicted: Prediction | None = None


def inspect_prompt(prefiller: Prefiller, request: GenerationRequest) -> Generator[Progress, None, Inspection]:
    """Plan, score and select. The selection is shown even where the plan is a full prefill; `reason` says why.

    Raises:
        SparseUnsupportedError: there is no draft, or it can't score.
    """
    yield Progress("queued", 0, len(request.prompt))
    text = prefiller.text.read(request.prompt)
    plan = prefiller.by_question(request, prefiller.planner.plan(request, 0), text)
    scores = yield from prefiller.scorer.scores(request, plan, text)
    selection = prefiller.select(text, scores, plan)
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
        reason=plan.reason,
        prompt_tokens=M,
        kept_tokens=int(selection.kept.size),
        importance=scores.importance,
        chunks=chunks,
        lookahead_tokens=scores.lookahead,
        forced_ranges=ranges,
        kept_spans=kept_spans(selection.kept),
        predicted=plan.predicted,
    )
