"""Requests in work: which stage each is in, since when, and how far. Never any content."""

from __future__ import annotations

import time
from typing import Any

from mlx_specprefill import Event, Progress, TokenEvent

__all__ = ["RunningRequest"]


class RunningRequest:
    """One request from its submission to its end; several answers to it count as one. Used on the event loop.

    Attributes:
        identity: name of the API key's identity.
    """

    def __init__(self, request_id: str | None, identity: str, prompt_tokens: int) -> None:
        self.identity = identity
        self.begun = time.time()
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        self._stages: list[tuple[str, float]] = [("queued", self.begun)]  # and when each began, seconds since the epoch
        self._done = self._total = self._made = 0
        self._cached: int | None = None

    def saw(self, event: Event) -> None:
        """Takes its place from an event of the engine."""
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
        """As the statistics list it. `done` of `total` tokens of the stage it is in; 0 of 0 while that says nothing."""
        return {
            "request_id": self._request_id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "stages": [{"stage": stage, "since": round(since, 3)} for stage, since in self._stages],
            "done": self._done,
            "total": self._total,
            "completion_tokens": self._made,
        }
