"""A model that a server knows, in memory or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..monitoring.metrics import Metrics
from ..service import Service
from ..settings import Settings

__all__ = ["Entry", "LoadProgress", "ModelState", "Tell"]

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading: a step in words, and `done` of its `total` parts. The parts are 0 of 0 while unknown."""

    step: str = "Waiting"
    done: int = 0
    total: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {"step": self.step, "done": self.done, "total": self.total}


@dataclass(eq=False)
class Entry:
    """A known model. Used on the event loop; the loading thread replaces `progress`.

    Attributes:
        id: its name for clients; `aliases` are further names; `name` is its name in the table.
        pin: it is loaded at the start of the server and stays in memory.
        ttl: idle seconds after which it is unloaded; None: it stays until its memory is needed.
        service: the loaded model, ready for requests; None: not in memory.
        context: largest number of tokens of prompt and answer, if known; memory may leave room for fewer.
        error: reason why it could not be loaded.
        users: number of running requests for it.
        last_use: end of the latest request, by the monotonic clock.
        loads: how many times it was loaded.
        task: the running load.
    """

    id: str
    settings: Settings
    name: str = ""
    aliases: tuple[str, ...] = ()
    pin: bool = False
    ttl: float | None = None
    metrics: Metrics = field(init=False)
    state: ModelState = "unloaded"
    service: Service | None = None
    context: int | None = None
    error: str | None = None
    progress: LoadProgress = LoadProgress()
    users: int = 0
    last_use: float = 0.0
    loads: int = 0
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(None, self.id)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.last_use

    @property
    def may_go(self) -> bool:
        """True if the model is in memory and nothing keeps it there."""
        if self.service is None or self.pin or self.users:
            return False
        health = self.service.engine.health()
        return not (health.running or health.queued)

    @property
    def weights(self) -> int:
        """The bytes of its models in memory."""
        if self.service is None:
            return 0
        memory = self.service.engine.stats().memory
        return memory.target_weights + memory.draft_weights


Tell = Callable[[LoadProgress], None]
