"""The length of each prefill chunk: as long as may be alone, and within `target_itl_ms` beside other requests."""

from __future__ import annotations

from ...config import EngineConfig
from ...events import Event, Progress
from ...loading.footprint import MOST_PAIRS
from ...pair import ModelPair
from ..requests.job import AnswerJob, Job
from ..requests.scheduler import Scheduler
from .costs import CostModel, ForwardKind

_SMALLEST = 64  # tokens of a chunk that requests wait for
_SMALLEST_BACKGROUND = 8  # of idle work, for which a request waits: on a slow CPU 16 tokens can take twice the aim
# Idle work takes this part of what `target_itl_ms` leaves beside a forward's fixed cost: of a hundred chunks, the
# slowest takes one and a half times the median.
_IDLE_PART = 2 / 3
# A chunk is no shorter than what loses this share of its time to the forward's fixed cost: beside other requests, in
# idle time (short chunks touch fewer experts, which hides some of that cost), and alone.
_FIXED_SHARE = 1 / 3
_FIXED_SHARE_IDLE = 0.25
_FIXED_SHARE_ALONE = 0.1
_ALONE_MS = 2000.0  # of a chunk for which nobody waits but who may come or leave: a short question, an abort, Ctrl-C


class ChunkSizer:
    """Sizes chunks for the job whose turn it is. MLX thread only, but for `expected_tokens`.

    Alone, a chunk takes two seconds at most, unless a tenth of its time would then be the fixed cost of a forward, and
    has at most `EngineConfig.prefill_step` tokens. Beside other requests a chunk takes about `target_itl_ms`, one of
    idle work less, unless some third of its time would be the fixed cost. From idle work, whose chunks are short, is
    learnt only what requests have not shown: no line fits short and long forwards of one machine alike.

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
        self._given = self._size(_kind(stage), depth, contended, job is not None and job.background)
        return self._given

    def expected_tokens(self, stage: str) -> int:
        """Return the tokens of a forward at the start of another prompt; from any thread."""
        return self._size(_kind(stage), 0, bool(self._scheduler.decoding), False)

    def _size(self, kind: ForwardKind, depth: int, contended: bool, background: bool) -> int:
        largest = min(self.largest, max(_SMALLEST, MOST_PAIRS // max(depth, 1)))
        cost, ms, share, smallest = self._costs.cost(kind), self._target_ms, _FIXED_SHARE, _SMALLEST
        if background:
            ms = cost.fixed + _IDLE_PART * (self._target_ms - cost.fixed)
            share, smallest = _FIXED_SHARE_IDLE, _SMALLEST_BACKGROUND
        elif not contended:
            ms, share = _ALONE_MS, _FIXED_SHARE_ALONE
        most = cost.most_tokens(ms, depth) // smallest * smallest
        least = round(cost.fewest_tokens(share, depth) / smallest) * smallest
        return min(largest, max(smallest, most, least))

    def observe(self, job: Job, event: Event) -> None:
        """Record the progress and time of the job's latest chunk."""
        if not isinstance(event, Progress):
            return
        if event.cached is not None:
            job.cached = event.cached
        ms, depth, stage = 1e3 * job.step_s, job.depth(event.stage), event.stage
        tokens = max(0, event.done - job.done.get(stage, 0))
        job.done[stage] = event.done
        reads = stage in ("draft", "prefill")
        self._scheduler.record(job.uid, event.total - event.done if reads else None, round(ms))
        if isinstance(job, AnswerJob):
            job.active.times.spend(stage, ms)
        if stage == "select":
            self._costs.observe("select", event.total, 0, ms)
        # More than was given out came from the draft's cache.
        elif reads and tokens <= self._given and not (job.background and self._costs.is_known(_kind(stage))):
            self._costs.observe(_kind(stage), tokens, depth, ms)


def _kind(stage: str) -> ForwardKind:
    """Return whose forwards a stage runs."""
    return "draft" if stage == "draft" else "target"
