"""A job of the MLX thread: its steps, its callbacks, its handle, and how it fails or is cancelled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...errors import RequestCancelled
from ...events import Event, Failed, OnEvent, Progress, noop
from ...request import GenerationRequest
from ...verdict import Verdict
from .active_request import ActiveRequest

log = logging.getLogger(__name__)


class Need(NamedTuple):
    """Bytes that a request will need.

    Attributes:
        held: while it runs.
        working: in addition, for its largest forward. Forwards take turns: requests share the largest.
    """

    held: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        return self.held + self.working


class RequestHandle:
    """Handle of a queued request. Usable from any thread, also after the last event."""

    def __init__(self, on_verdict: Callable[[Verdict], None] = noop) -> None:
        """Args:
        on_verdict: called on the MLX thread, once, after a sparse answer that was to be verified.
        """
        self.on_verdict = on_verdict
        self.cancelled = False
        self.expecting = False

    def cancel(self) -> None:
        """Stop within one step. The last event is then `Finished` with reason "cancelled"."""
        self.cancelled = True

    def expect_more(self) -> None:
        """Note that the conversation goes on, because the answer calls a tool: its text is densified first."""
        self.expecting = True


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """Description of a job, as sent to other ranks: `Engine`'s kind of work, and the arguments of its job."""

    uid: int
    kind: str
    arguments: tuple[Any, ...]


@dataclass
class Job:
    """Work without an answer, such as an inspection. Lives on the MLX thread once it was posted.

    Attributes:
        steps: the work; yields events, returns the result.
        need: the predicted memory, as admission reserves it.
        on_end: gets the result or the exception.
        background: no request waits for it.
        rereads: the answered request whose text it reads again; None: it is not such work.
        cached: tokens that the target need not read, as last reported.
        done: tokens per stage, as last reported.
        step_s: seconds that its latest step took.
        result: of the work, once it is done.
        task: its description; None for work that every rank starts by itself.
    """

    uid: int
    steps: Generator[Any, None, Any]
    need: Need = field(default_factory=Need)
    on_event: OnEvent = noop
    on_end: Callable[[Any], None] = noop
    handle: RequestHandle = field(default_factory=RequestHandle)
    background: bool = False
    rereads: GenerationRequest | None = None
    cached: int = 0
    done: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    result: Any = None
    task: TaskSpec | None = None

    def depth(self, stage: str) -> int:
        """Return the number of tokens that the model of this stage has read."""
        return self.done.get(stage, 0) + (self.tokens_cached if stage == "prefill" else 0)

    @property
    def tokens_cached(self) -> int:
        return self.cached

    def fail(self, error: Exception) -> None:
        """Report a failure."""
        self.on_end(error)

    def stop(self) -> None:
        """Cancel the work. It may keep what it has finished."""
        try:
            self.steps.throw(RequestCancelled())
        except (RequestCancelled, StopIteration):
            pass
        except Exception:
            log.exception("cleaning up a cancelled request failed")
        self.steps.close()

    def emit(self, event: Event) -> None:
        """Call the callback. If it raises, its job is cancelled and it is not called again."""
        try:
            self.on_event(event)
        except Exception:
            log.exception("a request's callback failed")
            self.handle.cancel()
            self.on_event = noop


@dataclass(kw_only=True)
class AnswerJob(Job):
    """A request with an answer. Its steps return the logits of the prompt's last token, (1, V)."""

    active: ActiveRequest

    @property
    def tokens_cached(self) -> int:
        return self.active.prefix.held.size

    def emit(self, event: Event) -> None:
        if isinstance(event, Progress) and event.stage != "queued":
            event = replace(event, cached=self.tokens_cached)
        super().emit(event)

    def fail(self, error: Exception) -> None:
        self.emit(Failed(error, self.active.report_given_up(self.done)))
