"""What the MLX thread works on: a request, an inspection or a background task, as slices and a way to report."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import RequestCancelled
from ..request import Event, Failed, GenerationRequest, Progress
from ..specprefill.plan import PrefillPlan
from .sequence import Sequence

__all__ = ["Job", "OnEvent", "RequestHandle", "Work", "bare", "ignore"]

log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


def ignore(_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a job does, as it goes to other ranks.

    Attributes:
        what: to make of the request, one of `Engine`'s kinds of work.
        plan: of a request that is to be answered.
        args: what else that takes.
    """

    uid: int
    what: str
    request: GenerationRequest
    plan: PrefillPlan | None = None
    args: tuple[Any, ...] = ()


@dataclass
class Job:
    """Lives on the MLX thread once it was posted.

    Attributes:
        slices: the work; yields events, returns what follows from it.
        sequence: None for inspections and background tasks.
        cached: tokens that the target need not read, as a background task reports them.
        done: tokens per stage, as last reported.
        on_end: gets the result or the exception of a job without sequence.
        slice_s: seconds that its latest slice took.
        work: what it does; None for background tasks, which begin by themselves.
    """

    uid: int
    on_event: OnEvent
    handle: RequestHandle
    slices: Generator[Any, None, Any]
    sequence: Sequence | None = None
    on_end: Callable[[Any], None] = ignore
    background: bool = False
    cached: int = 0
    done: dict[str, int] = field(default_factory=dict)
    slice_s: float = 0.0
    work: Work | None = None

    def depth(self, stage: str) -> int:
        """Return how many tokens the model of this stage holds already."""
        cached = self.cached if self.sequence is None else self.sequence.tokens_cached
        return self.done.get(stage, 0) + (cached if stage == "prefill" else 0)

    def advance(self) -> Event:
        """Run one slice.

        Raises:
            StopIteration: that was the last; its value is what the slices returned.
        """
        event: Event = next(self.slices)
        if isinstance(event, Progress) and event.stage != "queued" and self.sequence is not None:
            return replace(event, cached=self.sequence.cached)
        return event

    def stop(self) -> None:
        """End the slices as cancelled; they may keep what they have finished."""
        try:
            self.slices.throw(RequestCancelled())
        except (RequestCancelled, StopIteration):
            pass
        except Exception:
            log.exception("cleaning up a cancelled request failed")
        self.slices.close()

    def lose(self, error: Exception) -> None:
        """Report that it has failed, and nothing after that; from any thread."""
        on_event, self.on_event = self.on_event, ignore
        on_end, self.on_end = self.on_end, ignore
        if self.sequence is None:
            on_end(error)
        else:
            on_event(Failed(error, self.sequence.account()))

    def emit(self, event: Event) -> None:
        """Report. A callback that raises cancels its own job, and hears no more."""
        try:
            self.on_event(event)
        except Exception:
            log.exception("a request's callback failed")
            self.handle.cancel()
            self.on_event = ignore


def bare(error: Exception) -> Exception:
    """Without the frames that it and its causes went through: their arrays would live as long as the event does."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


class RequestHandle:
    """Usable from any thread, also after the request's last event."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._expecting = threading.Event()

    def cancel(self) -> None:
        """Stop within one slice of work; the last event is then `Finished` with reason "cancelled"."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def expect_more(self) -> None:
        """The conversation certainly goes on, because the answer called a tool: its text is worth preparing first."""
        self._expecting.set()

    @property
    def expecting(self) -> bool:
        return self._expecting.is_set()
