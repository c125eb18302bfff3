"""Choose how many tokens each prefill chunk reads, and learn from what it took."""

from __future__ import annotations

import math

from ..config import EngineConfig
from ..loading import ModelPair
from ..request import Event, Progress
from .admission.footprint import MOST_PAIRS
from .costs import CostModel, ForwardKind
from .job import Job
from .scheduler import Scheduler

__all__ = ["ChunkSizer"]

_SMALLEST = 64  # tokens of a chunk that requests wait for
_SMALLEST_BACKGROUND = 16
# Beside other requests a chunk is no shorter than what loses this share of its time to the forward's fixed cost.
_FIXED_SHARE = 1 / 3


class ChunkSizer:
    """Sizes chunks for the job whose turn it is. MLX thread only, but for `expected`.

    Alone, a prefill runs in chunks of `EngineConfig.prefill_step`. Beside other requests a chunk takes about
    `target_itl_ms`. It is never so short that a third of its time would be the fixed cost of a forward, but for those
    of idle work.

    Attributes:
        largest: tokens of a chunk at most.
        elsewhere: answers of other engines wait for the chunk to end.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, scheduler: Scheduler, costs: CostModel) -> None:
        self._pair = pair
        self._scheduler = scheduler
        self._costs = costs
        self._target_ms = config.target_itl_ms
        self._job: Job | None = None
        self._given = 0  # tokens of the latest chunk at most
        self.largest = config.prefill_step
        self.elsewhere = False

    def begin(self, job: Job) -> None:
        """Size the chunks that are asked for from now on for this job."""
        self._job = job

    def end(self, job: Job) -> None:
        """Let go of a job that gets no more chunks."""
        if self._job is job:
            self._job = None

    def halve(self) -> int:
        """Make the longest chunk half as long, and return its tokens."""
        self.largest = max(min(_SMALLEST, self.largest), self.largest // 2)
        return self.largest

    def size(self, stage: str) -> int:
        """Return the tokens of the next forward of "draft" or "prefill"."""
        job = self._job
        depth = 0 if job is None else job.depth(stage)
        contended = self.elsewhere or self._scheduler.is_contended
        self._given = self._size(_kind(stage, job), depth, contended, job is not None and job.background)
        return self._given

    def expected(self, stage: str) -> int:
        """Return the tokens of a forward at the start of another prompt; from any thread."""
        return self._size(_kind(stage, None), 0, bool(self._scheduler.decoding), False)

    def _size(self, kind: ForwardKind, depth: int, contended: bool, background: bool) -> int:
        largest = min(self.largest, max(_SMALLEST, MOST_PAIRS // max(depth, 1)))
        if not (contended or background):
            return largest
        cost = self._costs.cost(kind)
        smallest = _SMALLEST_BACKGROUND if background else _SMALLEST
        fitting = cost.fitting(self._target_ms, depth) // smallest * smallest
        if background:
            return min(largest, max(smallest, fitting))
        least = math.ceil(cost.losing(_FIXED_SHARE, depth) / smallest) * smallest
        return min(largest, max(smallest, fitting, least))

    def observe(self, job: Job, event: Event) -> None:
        """Record the progress and time of the job's latest chunk."""
        if not isinstance(event, Progress):
            return
        if event.cached is not None:
            job.cached = event.cached
        ms, depth, stage = 1e3 * job.slice_s, job.depth(event.stage), event.stage
        tokens = max(0, event.done - job.done.get(stage, 0))
        job.done[stage] = event.done
        reads = stage in ("draft", "prefill")
        self._scheduler.served(job.uid, event.total - event.done if reads else None, round(ms))
        if job.sequence is not None:
            job.sequence.spend(stage, ms)
        if stage == "select":
            self._costs.observe("select", event.total, 0, ms)
        elif reads and tokens <= self._given:  # more than was given out came from the draft's cache
            self._costs.observe(_kind(stage, job), tokens, depth, ms)


def _kind(stage: str, job: Job | None) -> ForwardKind:
    """Return which layers the forwards of a stage run through."""
    if stage == "draft":
        return "draft"
    return "upper" if job is not None and job.sequence is not None and job.sequence.staged else "target"
