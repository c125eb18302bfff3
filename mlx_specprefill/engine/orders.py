"""What comes to the MLX thread: from the inbox, or on another rank than the first what rank 0 took out of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..distributed.ranks import ALONE, Ranks
from .inbox import Call, Inbox
from .job import Job, Work

__all__ = ["Orders"]

Order = Work | tuple[str, tuple[Any, ...]] | bool  # False: nothing came; True: something that is rank 0's alone


class Orders:
    """The same jobs and calls in the same order on all ranks, and the same steps between them.

    Args:
        make: a job that does some work, and tells nobody.
        calls: what `Call.named` names.

    Attributes:
        over: nothing more will come.
    """

    def __init__(
        self,
        inbox: Inbox,
        ranks: Ranks = ALONE,
        make: Callable[[Work], Job] | None = None,
        calls: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.ranks = ranks
        self._inbox = inbox
        self._make = make
        self._calls = calls or {}
        self._ended = False

    @property
    def follows(self) -> bool:
        """Whether rank 0 says when to take the next step."""
        return not (self.ranks.leads or self._ended)

    @property
    def over(self) -> bool:
        return self._ended if not self.ranks.leads else not (self._inbox.is_open or self._inbox)

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._inbox)

    def begin_step(self) -> bool:
        """False where it was the last one that rank 0 took."""
        self._ended = not self.ranks.agree("step", lambda: True)
        return not self._ended

    def end(self) -> None:
        """There are no more steps."""
        if not self._ended:
            self._inbox.close()
            self.ranks.agree("step", lambda: False)
            self._ended = True

    def accepting(self) -> bool:
        return self.ranks.agree("accepting", lambda: self._inbox.is_open)

    def next_uid(self) -> int:
        return self.ranks.agree("uid", self._inbox.next_uid)

    def take(self) -> Job | Call | None:
        """What came next, if something has come."""
        if self.ranks.leads:
            taken = self._inbox.take(0.0)
            self.ranks.agree("order", lambda: _order(taken))
            return taken
        order: Order = self.ranks.agree("order", lambda: False)
        if isinstance(order, Work):
            assert self._make is not None
            job = self._make(order)
            self._inbox.note(job)
            return job
        if isinstance(order, tuple):
            name, args = order
            return Call(lambda: self._calls[name](*args))
        return Call(lambda: None) if order else None


def _order(taken: Job | Call | None) -> Order:
    if isinstance(taken, Job):
        return taken.work or True
    if isinstance(taken, Call):
        return taken.named or True
    return False
