"""Jobs of the MLX thread: a request, an inspection or a background task, as steps and a callback."""

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

__all__ = ["Job", "OnEvent", "RequestHandle", "Work", "noop", "strip_traceback"]

log = logging.getLogger(__name__)
OnEvent = Callable[[Event], None]


def noop(_: object) -> None:
    """A callback that does nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Description of a job, as sent to other ranks.

    Attributes:
        what: one of `Engine`'s kinds of work.
        plan: of a request with an answer.
        args: further arguments.
    """

    uid: int
    what: str
    request: GenerationRequest
    plan: PrefillPlan | None = None
    args: tuple[Any, ...] = ()


@dataclass
class Job:
    """A job. Lives on the MLX thread once it was posted.

    Attributes:
        slices: the work; yields events, returns the result.
        sequence: None for inspections and background tasks.
        cached: tokens that the target need not read, as a background task reports them.
        done: tokens per stage, as last reported.
        on_end: gets the result or the exception of a job without sequence.
        slice_s: seconds that its latest slice took.
        work: its description; None for background tasks, which every rank starts by itself.
    """

    uid: int
    on_event: OnEvent
    handle: RequestHandle
    slices: Generator[Any, None, Any]
    sequence: Sequence | None = None
    on_end: Callable[[Any], None] = noop
    background: bool = False
    cached: int = 0
    done: dict[str, int] = field(default_factory=dict)
    slice_s: float = 0.0
    work: Work | None = None

    def depth(self, stage: str) -> int:
        """Return the number of tokens that the model of this stage has read."""
        cached = self.cached if self.sequence is None else self.sequence.tokens_cached
        return self.done.get(stage, 0) + (cached if stage == "prefill" else 0)

    def advance(self) -> Event:
        """Run one step.

        Raises:
            StopIteration: that was the last step; its value is the result.
        """
        event: Event = next(self.slices)
        if isinstance(event, Progress) and event.stage != "queued" and self.sequence is not None:
            return replace(event, cached=self.sequence.cached)
        return event

    def stop(self) -> None:
        """Cancel the work. It may keep what it has finished."""
        try:
            self.slices.throw(RequestCancelled())
        except (RequestCancelled, StopIteration):
            pass
        except Exception:
            log.exception("cleaning up a cancelled request failed")
        self.slices.close()

    def lose(self, error: Exception) -> None:
        """Report a failure, and nothing afterwards. May be called from any thread."""
        on_event, self.on_event = self.on_event, noop
        on_end, self.on_end = self.on_end, noop
        if self.sequence is None:
            on_end(error)
        else:
            on_event(Failed(error, self.sequence.report()))

    def emit(self, event: Event) -> None:
        """Call the callback. If it raises, its job is cancelled and it is not called again."""
        try:
            self.on_event(event)
        except Exception:
            log.exception("a request's callback failed")
            self.handle.cancel()
            self.on_event = noop


def strip_traceback(error: Exception) -> Exception:
    """Return the error without tracebacks, also in its causes: their arrays would live as long as the event does."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error


class RequestHandle:
    """Handle of a queued request. Usable from any thread, also after the last event."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._expecting = threading.Event()

    def cancel(self) -> None:
        """Stop within one step. The last event is then `Finished` with reason "cancelled"."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def expect_more(self) -> None:
        """Note that the conversation goes on, because the answer calls a tool: its text is densified first."""
        self._expecting.set()

    @property
    def expecting(self) -> bool:
        return self._expecting.is_set()
