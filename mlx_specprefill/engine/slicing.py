"""How long the slices of prefills are, and what they turned out to take."""

from __future__ import annotations

from collections.abc import Callable

from ..config import EngineConfig
from ..request import Event, Progress
from .job import Job
from .scheduler import Scheduler, SliceSizer

__all__ = ["Slicing"]

_SMALLEST = 64  # tokens of a slice
_TELLING = 32  # tokens of a slice from which on its time says something about speed


class Slicing:
    """Sizes for the job whose turn it is. MLX thread only, but for `expected` and `full_slices`.

    Args:
        longest: tokens per forward of "draft" or "prefill" above which a prompt is read more slowly.

    Attributes:
        elsewhere: whether answers of other engines wait for the slice.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, longest: Callable[[str], int]) -> None:
        self._scheduler = scheduler
        self._longest = longest
        self._sizer = SliceSizer(config.prefill_step, min(_SMALLEST, config.prefill_step), config.slice_target_ms)
        self._job: Job | None = None
        self._given = 0  # tokens of the latest slice at most
        self.elsewhere = False

    def begin(self, job: Job) -> None:
        """The slices asked for from now on are this job's."""
        self._job = job

    def end(self, job: Job) -> None:
        """The job gets no more slices: what it holds is not to live until the next one begins."""
        if self._job is job:
            self._job = None

    def size(self, kind: str) -> int:
        """Tokens for the next forward of "draft" or "prefill"."""
        job = self._job
        background = job is not None and job.background
        depth = 0 if job is None else job.depth(kind)
        scheduler = self._scheduler
        size = self._sizer.size(kind, self.elsewhere or bool(scheduler.decoding), background, depth, scheduler.crowded)
        self._given = min(size, self._longest(kind))
        return self._given

    def expected(self, kind: str) -> int:
        """What `size` would give out at the start of a prompt; from any thread, and nothing changes by it."""
        return min(self._sizer.size(kind, bool(self._scheduler.decoding)), self._longest(kind))

    def full_slices(self, tokens: int, cached: int) -> int:
        """How many slices of the target time the prefill of so many tokens behind `cached` ones takes."""
        return self._sizer.full_slices("prefill", tokens, cached)

    def account(self, job: Job, event: Event) -> None:
        """The job's latest slice came to `event`."""
        if not isinstance(event, Progress):
            return
        ms, depth = 1e3 * job.slice_s, job.depth(event.stage)
        tokens = max(0, event.done - job.done.get(event.stage, 0))
        job.done[event.stage] = event.done
        read = event.stage == "prefill" and event.done == event.total
        self._scheduler.served(job.uid, tokens, round(ms), read)
        if job.sequence is not None:
            job.sequence.spend(event.stage, ms)
        if read and 0 < tokens <= _SMALLEST:
            self._sizer.observe_short(ms)
        # More than was given out came from the draft's cache; next to nothing is not about speed.
        if event.stage in ("draft", "prefill") and _TELLING <= tokens <= self._given:
            self._sizer.observe(event.stage, tokens, ms, depth)
