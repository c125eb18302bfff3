"""The running requests and the last answers of each API key, as the statistics show them. Never any text."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

from mlx_specprefill import Event, Finished, Progress, TokenEvent

from ..generation.generation import AnswerResult

T = TypeVar("T")


HELD = 50  # answers per API key


class RunningRequest:
    """One request from its submission to its end. Several answers to it count as one. Used on the event loop.

    Attributes:
        identity: name of the API key's identity.
    """

    def __init__(self, request_id: str | None, identity: str, prompt_tokens: int) -> None:
        self.identity = identity
        self.begun = time.time()
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        # each stage with its start, in seconds since the epoch
        self._stages: list[tuple[str, float]] = [("queued", self.begun)]
        self._done = self._total = self._made = 0
        self._cached: int | None = None

    def update(self, event: Event) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case Progress():
                self._enter(event.stage)
                self._done, self._total = event.done, event.total
                self._cached = self._cached if event.cached is None else event.cached
            case TokenEvent():
                self._enter("decode")
                self._made += 1
                self._done = self._total = 0

    def _enter(self, stage: str) -> None:
        if stage != self._stages[-1][0] and stage != "queued":
            self._stages.append((stage, time.time()))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for the statistics. `done` of `total` tokens of the stage are 0 of 0 while unknown."""
        return {
            "request_id": self._request_id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "stages": [{"stage": stage, "since": round(since, 3)} for stage, since in self._stages],
            "done": self._done,
            "total": self._total,
            "completion_tokens": self._made,
        }


class NewestAnswers(Generic[T]):
    """The last answers of each API key. Used on the event loop."""

    def __init__(self) -> None:
        # One queue per API key. A common one would reveal other keys' traffic by the time an answer stays in it.
        self._answers: defaultdict[str, deque[tuple[float, T]]] = defaultdict(partial(deque, maxlen=HELD))
        self._forgotten: dict[str | None, float] = {}  # times by API key, None: all keys

    def add(self, identity: str, answer: T, made: float) -> None:
        """Add an answer that ends now to those of an API key, given by its identity's name.

        Args:
            made: when its request came (`GenerationRequest.made`). One from before `forget` is left out.
        """
        if made > max(self._forgotten.get(name, -math.inf) for name in (None, identity)):
            self._answers[identity].appendleft((time.time(), answer))

    def forget(self, identity: str | None) -> None:
        """Drop the answers to all that one API key has asked by now, or all keys have."""
        self._forgotten[identity] = time.monotonic()
        for name in list(self._answers) if identity is None else [identity]:
            self._answers.pop(name, None)

    def newest_first(self, identity: str | None) -> list[T]:
        """Return the answers to one API key, or to all keys if it is None."""
        shown = self._answers.values() if identity is None else [self._answers.get(identity, deque())]
        newest = merge(*shown, key=itemgetter(0), reverse=True)
        return [answer for _, answer in islice(newest, HELD)]


def recent_answer(result: AnswerResult, request_id: str | None) -> dict[str, Any]:
    """Return an answer's entry in the statistics."""
    report = result.event.report
    return {
        "request_id": request_id,
        "ended": round(time.time(), 3),
        "finish": result.reason,
        "completion_tokens": result.event.completion_tokens if isinstance(result.event, Finished) else 0,
        "specprefill": None if report is None else report.to_dict(),
    }
