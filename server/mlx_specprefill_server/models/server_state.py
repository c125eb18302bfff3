"""The state that all models of a server share: running requests and how they end, recent answers, verdicts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mlx_specprefill import EngineClosedError, RequestHandle

from ..generation.event_loop import ThreadsafeCalls
from ..generation.generation import Generation
from ..http.access_log import current_deadline
from ..http.body_room import BodyRoom
from ..monitoring.answers import NewestAnswers, RunningRequest
from ..monitoring.verdicts import Verdicts
from ..settings.server import Settings

CONVERTERS = 2  # threads; they compete with the event loop for the interpreter
PATIENCE_S = 5.0  # seconds for the engine to end an answer itself, between two of its steps

T = TypeVar("T")


class ServerState:
    """The state that all models of one server share. Used on the event loop.

    Attributes:
        requests: POST requests that have no response yet.
        draining: running requests may finish, new ones are refused.
        inspections: the running ones.
        bodies: the room for large bodies.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = int(time.time())
        self.recent: NewestAnswers[dict[str, Any]] = NewestAnswers()
        self.verdicts = Verdicts()
        self.requests = 0
        self.draining = False
        self.stopping = False
        self.inspections: set[RequestHandle] = set()
        self.bodies = BodyRoom()
        self._generations: WeakKeyDictionary[Generation, RunningRequest] = WeakKeyDictionary()
        self._loop_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadsafeCalls] = WeakKeyDictionary()
        self._converters = ThreadPoolExecutor(CONVERTERS, thread_name_prefix="bodies")

    async def convert(self, call: Callable[[], T], large: bool) -> T:
        """Return the result of `call`. A large body is converted in a thread beside the event loop."""
        if not large:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._converters, call)

    def calls(self) -> ThreadsafeCalls:
        """The calls to the running loop."""
        loop = asyncio.get_running_loop()
        return self._loop_calls.setdefault(loop, ThreadsafeCalls(loop))

    def add(self, generation: Generation, line: RunningRequest) -> None:
        """Add answers that end when the server stops. Their line is listed while they run."""
        self._generations[generation] = line
        if (deadline := current_deadline()) is not None:
            generation.end_at(*deadline)

    def forget(self, identity: str | None) -> None:
        """Drop the last answers of one API key, or of all, and the verdicts on them."""
        self.recent.forget(identity)
        self.verdicts.forget(identity)

    def running(self, identity: str | None) -> list[RunningRequest]:
        """Return the running requests, oldest first, of one API key or of all, as `NewestAnswers.newest_first`."""
        lines = [line for generation, line in self._generations.items() if generation.running]
        return sorted((line for line in lines if identity in (None, line.identity)), key=lambda line: line.begun)

    def refuse_when_stopping(self) -> None:
        """Refuse requests while the server stops, by an EngineClosedError."""
        if self.stopping:
            raise EngineClosedError("the server is shutting down")

    def stop(self) -> None:
        """End all running answers so that each stream closes properly, and refuse new ones."""
        self.draining = self.stopping = True
        for generation in list(self._generations):
            generation.stop(PATIENCE_S)
        for handle in self.inspections:
            handle.cancel()
