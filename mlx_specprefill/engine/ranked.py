"""Engine whose target runs on several processes (ranks), which take the same steps in the same order.

Rank 0 takes requests and decides whatever depends on a clock, a client or chance. It sends its decisions to the others.
A prefix, a session or memory counts only if all ranks have it: each rank evicts, and reads its disk, by itself. Every
class here is a part of `Engine` that asks `Ranks` where a single process decides alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ..cache.prefix.nodes import CacheHit
from ..cache.prefix.selection_key import SelectionKey
from ..config import EngineConfig
from ..distributed.ranks import Ranks
from ..errors import EngineError, RequestCancelled
from ..events import Progress
from ..pair import ModelPair
from ..request import CacheLabel, GenerationRequest, TokenIds
from ..selection.plan import PrefillPlan
from ..selection.scorer import Scores
from ..selection.text import PromptText
from .engine import Engine
from .memory.reservations import Memory
from .prefixes.caches import EngineCaches, Erasure, Lookup
from .prefixes.lookup import Prefix
from .reading.chunks import ChunkSizer
from .reading.planner import Planner
from .reading.prefill import Prefiller
from .reading.scoring import Extension, PromptScorer, Scoring
from .requests.active_request import ActiveRequest
from .requests.job import Job, Need, TaskSpec
from .thread.background import BackgroundPrefill, IdleTurn
from .thread.inbox import Call
from .thread.loop import EngineCore
from .thread.mlx_thread import MLXThread

T = TypeVar("T")
_REST_S = 0.05  # between two idle steps: a rank that waits for another in MLX's ring keeps a core busy
_MOST = (1 << 30) - 1  # the largest value that `Ranks.min_max` compares
_Order: TypeAlias = TaskSpec | tuple[str | None, tuple[Any, ...]]
_Find = Callable[[Sequence[int] | TokenIds, bool], Lookup]


class _Ranked:
    """A part of an engine, in front of the class that decides alone.

    Args:
        ranks: of the target.
        parts: what that class is made of.
    """

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        self._ranks = ranks
        super().__init__(*parts)


class RankedCaches(_Ranked, EngineCaches):
    """Each rank keeps its part of every prefix."""

    def _identities(self, pair: ModelPair) -> tuple[str, str]:
        return self._ranks.broadcast("identities", lambda: super(RankedCaches, self)._identities(pair))

    def _folder(self, folder: Path) -> Path:
        return folder / f"rank-{self._ranks.rank}-of-{self._ranks.size}"

    def target_prefix(
        self,
        tokens: Sequence[int] | TokenIds,
        label: CacheLabel,
        again: bool = False,
        selection_key: SelectionKey | None = None,
    ) -> Lookup:
        def find(prefix: Sequence[int] | TokenIds, again: bool) -> Lookup:
            return super(RankedCaches, self).target_prefix(prefix, label, again, selection_key)

        hit = yield from self._common(find, tokens, again)
        held = 0 if hit is None or hit.held.dense == hit.length else 1 + zlib.crc32(hit.held.marked.tobytes()) % _MOST
        lowest, highest = self._ranks.min_max(held)
        if lowest == highest:
            return hit
        return (yield from self.target_prefix(tokens, label, again))  # ranks have different prefixes

    def draft_prefix(self, tokens: Sequence[int] | TokenIds, label: CacheLabel, again: bool = False) -> Lookup:
        def find(prefix: Sequence[int] | TokenIds, again: bool) -> Lookup:
            return super(RankedCaches, self).draft_prefix(prefix, label, again)

        if self._pair.split is not None:
            return self._common(find, tokens, again)
        return find(tokens, again)

    def _common(self, find: _Find, tokens: Sequence[int] | TokenIds, again: bool) -> Lookup:
        """Return the longest prefix that all ranks have."""
        hit = yield from self._in_step(find(tokens, again))
        length = 0 if hit is None else hit.length
        least, most = self._ranks.min_max(length)
        while least < most:
            steps = find(tokens[: least + 1], True) if length > least > 0 else _found(hit if least else None)
            hit = yield from self._in_step(steps)
            length = 0 if hit is None else hit.length
            least, most = self._ranks.min_max(length)
        return hit

    def _in_step(self, steps: Lookup) -> Lookup:
        """Return what the steps find, once all ranks have done theirs: they take different time."""
        hit: CacheHit | None = None
        done, event = False, Progress("queued", 0, 0)
        while True:
            try:
                event = event if done else next(steps)
            except StopIteration as ended:
                hit, done = ended.value, True
            if self._ranks.all(done):
                return hit
            yield event

    def erasure(self) -> Erasure:
        return Erasure(self._ranks.min_max(super().erasure())[0])

    def covers(self, *wanted: Any) -> int:
        return self._ranks.broadcast("covered", lambda: super(RankedCaches, self).covers(*wanted))


class RankedMemory(_Ranked, Memory):
    """Plans with the memory of the smallest rank."""

    def measure(self) -> None:
        super().measure()
        self.step, _ = self._ranks.min_max(self.step)
        window, _ = self._ranks.min_max(self.window())
        limit = self.limit
        if self._ranks.all(limit is not None) and limit is not None and window < self.window():
            parts = [(self._target, window)]
            if self._pair.draft_is_first:  # the others have the same room for the target alone
                parts.append((self._draft, round(window * self._pair.draft_ratio)))
            self.limit = min(limit, self.weights + self._need(*parts, more=self._row_bytes).total)
            self._longest = window

    def _go_without(self, error: Exception) -> None:
        self._ranks.end(f"its memory can't be measured: {error}")

    def fits(self, need: Need) -> bool:
        return self._ranks.all(super().fits(need))

    def may_fit(self, need: Need) -> bool:
        return self._ranks.all(super().may_fit(need))

    def can_be_freed(self, uid: int, need: Need) -> bool:
        return self._ranks.all(super().can_be_freed(uid, need))


class RankedChunkSizer(_Ranked, ChunkSizer):
    """Rank 0 sizes the chunks: the ranks' measurements may differ."""

    def size(self, stage: str) -> int:
        def own() -> int:
            return super(RankedChunkSizer, self).size(stage)

        if stage == "draft" and self._pair.draft_is_first:
            return own()  # rank 0 alone asks
        return self._ranks.broadcast("chunk", own)


class RankedScorer(_Ranked, PromptScorer):
    """Rank 0 scores: machines may round differently."""

    def scores(
        self,
        request: GenerationRequest,
        plan: PrefillPlan,
        text: PromptText,
        extension: Extension | None = None,
    ) -> Scoring:
        begin = partial(super().scores, request, plan, text, extension)
        if self.pair.draft_is_first and request.specprefill.importance is None:
            return self._by_rank_0(begin)
        return self._agreed(begin())

    def _agreed(self, steps: Scoring) -> Scoring:
        result = yield from steps
        return replace(result, importance=self._ranks.broadcast("importance", lambda: result.importance))

    def _by_rank_0(self, begin: Callable[[], Scoring]) -> Scoring:
        """Score with the draft on rank 0. The others wait for each of its chunks and compute nothing.

        They get its result without the cache.

        Raises:
            EngineError: the draft failed, on all ranks.
        """
        own, work = list[Scores](), _later(begin)

        def step() -> Progress | Scores | str:
            try:
                return next(work)
            except StopIteration as finished:
                own.append(finished.value)
                return replace(own[0], cache=[])
            except Exception as error:  # noqa: BLE001 - it is raised on all ranks
                return f"{type(error).__name__}: {error}"

        while True:
            found = self._ranks.broadcast("draft", step)
            if isinstance(found, str):
                raise EngineError(found)
            if isinstance(found, Scores):
                return own[0] if own else found
            try:
                yield found
            except RequestCancelled as cancelled:
                work.throw(cancelled)  # it keeps the chunks that it has read, and raises the error again
                raise


def _later(begin: Callable[[], Scoring]) -> Scoring:
    """Begin with the first step."""
    return (yield from begin())


class RankedPlanner(_Ranked, Planner):
    """Decides as rank 0 does, whose measurements may differ."""

    def decide(self, request: GenerationRequest, submitted: PrefillPlan) -> tuple[PrefillPlan, Prefix]:
        return self._ranks.broadcast("plan", lambda: super(RankedPlanner, self).decide(request, submitted))


class RankedPrefiller(_Ranked, Prefiller):
    """Fails a sparse prefill on all ranks together."""

    def __init__(self, ranks: Ranks, *parts: Any) -> None:
        self._scorer_type, self._planner_type = partial(RankedScorer, ranks), partial(RankedPlanner, ranks)
        super().__init__(ranks, *parts)

    def _start_over(self, active: ActiveRequest, error: Exception) -> None:
        self._ranks.fail_together(error)
        super()._start_over(active, error)


class RankedBackgroundPrefill(_Ranked, BackgroundPrefill):
    """Densifies the same turns on all ranks: rank 0 knows which answers called a tool."""

    def _has_room(self, active: ActiveRequest) -> bool:
        return self._ranks.all(super()._has_room(active))

    def _is_expecting(self, turn: IdleTurn) -> bool:
        return self._ranks.broadcast("expecting", lambda: super(RankedBackgroundPrefill, self)._is_expecting(turn))


class _End:
    """Rank 0's last order."""


class RankedEngineCore(_Ranked, EngineCore):
    """Takes the same steps on all ranks: the same jobs in the same order, with the same number of ticks between them.

    Args:
        make: makes a job on the other ranks from rank 0's description.
    """

    _told_end = False  # the ranks take no more orders

    def __init__(self, make: Callable[[TaskSpec], Job], *parts: Any) -> None:
        self._make = make
        super().__init__(*parts)

    @property
    def rest_s(self) -> float:
        """Return the same on all ranks, so that none of them waits long for another."""
        return min(super().rest_s, _REST_S)

    def _take(self) -> Job | Call | None:
        """Take rank 0's next job or call on every rank."""
        if self._told_end:
            return super()._take()
        is_last = not self._inbox.is_open
        taken = super()._take() if self._ranks.leads else None
        order = self._ranks.broadcast("order", lambda: _order(taken, is_last))
        if isinstance(order, _End):
            self._told_end = True
            self._inbox.close()
            return None
        return taken if self._ranks.leads or order is None else self._obey(order)

    def _obey(self, order: _Order) -> Job | Call:
        if isinstance(order, TaskSpec):
            job = self._make(order)
            self._scheduler.add(job.uid)
            return job
        method, arguments = order
        return Call(lambda: None if method is None else getattr(self, method)(*arguments))

    def _is_accepting(self) -> bool:
        return not self._told_end

    def _decide(self, what: str, read: Callable[[], T]) -> T:
        return self._ranks.broadcast(what, read)

    def _start_over(self, error: Exception) -> None:
        self._ranks.fail_together(error)
        super()._start_over(error)

    def _fail(self, job: Job, error: Exception) -> None:
        self._ranks.fail_together(error)
        super()._fail(job, error)


def _found(hit: CacheHit | None) -> Lookup:
    """Return what was found before."""
    yield from ()
    return hit


def _order(taken: Job | Call | None, is_last: bool) -> _Order | _End | None:
    """Return the order for the other ranks: a job's description, a method with its arguments, or None."""
    if isinstance(taken, Job):
        return taken.task
    if isinstance(taken, Call):
        return taken.method, taken.arguments
    return _End() if is_last else None


class RankedEngine(Engine):
    """The engine of one rank. Rank 0 takes requests; the others `follow` it."""

    def __init__(self, pair: ModelPair, config: EngineConfig | None = None, *, thread: MLXThread | None = None) -> None:
        if pair.ranks is None:
            raise ValueError("the target of a ranked engine has to be spread over ranks")
        ranks = pair.ranks
        self._caches_type = partial(RankedCaches, ranks)
        self._chunks_type = partial(RankedChunkSizer, ranks)
        self._prefiller_type = partial(RankedPrefiller, ranks)
        self._memory_type = partial(RankedMemory, ranks)
        self._densifier_type = partial(RankedBackgroundPrefill, ranks)
        self._loop_type = partial(RankedEngineCore, self._make_described, ranks)
        super().__init__(pair, config, thread=thread)

    def follow(self) -> None:
        """Follow rank 0 on another rank until its engine ends."""
        self.start()
        self.loop.ended.wait()
        self.close()
