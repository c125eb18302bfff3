"""The models of one server: the one that a request names or its 404, those in memory, and which makes room for another.

One model is loaded or unloaded at a time. Requests for models in memory run meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from mlx_specprefill import Engine, EngineClosedError, EngineError, RequestCancelled, forget_files

from ..http.errors import ApiError
from ..pairs import MissingPairError, size
from .entry import RETRY_AFTER_S, Entry, LoadProgress, NoRoomError, ids_of, load_error, reason_of
from .loader import Loader
from .server_state import ServerState
from .service import Service

logger = logging.getLogger(__name__)
LOOK_AGAIN_S = 1.0  # seconds between looks at an expired model in use
PATIENCE_S = 30.0  # seconds in which a loading waits for room that was taken in the meantime


class Models:
    """The models of a server. Used on the event loop.

    Args:
        entries: the first one is the default.
        host: loads and unloads models; None: they are in memory and stay.
        max_models: largest number of models in memory; None: as many as fit.

    Attributes:
        state: the shared state of the models.
    """

    def __init__(
        self, state: ServerState, entries: Sequence[Entry], host: Loader | None = None, max_models: int | None = None
    ) -> None:
        self.state = state
        self._entries = tuple(entries)
        self._names = {name: entry for entry in reversed(entries) for name in (*entry.aliases, entry.id)}
        self._host = host
        self._max = max_models or len(entries)
        self._lock = asyncio.Lock()
        self._freed = asyncio.Event()  # a request is over
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        if host is not None:
            host.call_on_pressure(self._make_room_for_requests)

    @classmethod
    def of(cls, service: Service) -> Models:
        """Return the one model that a server has from its start to its end."""
        entry = Entry(service.model_id, service.settings, pin=True, state="loaded", service=service, loads=1)
        entry.metrics = service.metrics
        return cls(service.state, [entry])

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def default(self) -> Entry:
        return self._entries[0]

    @property
    def several(self) -> bool:
        """True if the server loads and unloads models on demand."""
        return self._host is not None

    @property
    def lost(self) -> str | None:
        """The reason why nothing can be computed any more: a rank is gone, or a device has given up. None otherwise."""
        states = (entry.service.engine.health() for entry in self if entry.service is not None)
        return next((state.lost for state in states if state.lost is not None), None)

    # --- which one ---------------------------------------------------------------------------------------------------

    def find(self, name: Any) -> Entry:
        """Return the model that a request's `model` names, else the default one, unless the settings make it a 404."""
        if name is None or (isinstance(name, str) and name in self._names):
            return self.default if name is None else self._names[name]
        if self.state.settings.strict_model:
            raise self._not_found(name)
        return self.default

    def get(self, name: str) -> Entry:
        """Return the model of that id or alias; an ApiError 404 without one."""
        if name not in self._names:
            raise self._not_found(name)
        return self._names[name]

    def _not_found(self, name: Any) -> ApiError:
        if self.several:
            message = f"The model {name!r:.100} is not known; this server has: {', '.join(e.id for e in self)}."
        else:
            message = f"The model {name!r:.100} is not loaded; {self.default.id!r} is."
        return ApiError(404, message, param="model", code="model_not_found")

    def in_memory(self, name: str | None) -> Service:
        """Return a model in memory: the named one, else the default one, else the one used last.

        Raises:
            ApiError: 404: no such model; 503: it is not in memory.
        """
        entries = self._named(name) or [entry for entry in self if entry.service is not None]
        chosen = (
            self.default if self.default in entries else max(entries, key=lambda entry: entry.last_use, default=None)
        )
        if chosen is None or chosen.service is None:
            what = "No model is" if chosen is None else f"The model {chosen.id!r} is not"
            raise ApiError(503, f"{what} loaded.", code="model_not_loaded", headers={"Retry-After": RETRY_AFTER_S})
        return chosen.service

    def _named(self, name: str | None) -> list[Entry]:
        """Return the model that the query of a request names, none where any will do; an ApiError 404 without one."""
        picks = self.several or self.state.settings.strict_model
        return [self.get(name)] if picks and name is not None else []

    def warnings_of(self, name: str | None) -> dict[str, list[str]]:
        """Return as a field of a response the warning that the one model of this server answers for another name."""
        service = None if self.several else self.default.service
        return {} if service is None else service.warnings_of(name)

    # --- into memory -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, entry: Entry) -> AsyncIterator[None]:
        """Keep the model in memory while the context lasts."""
        entry.users += 1
        try:
            yield
        finally:
            entry.users -= 1
            entry.last_use = time.monotonic()
            self._freed.set()
            self._watch(entry)

    async def start_loading(self, entry: Entry) -> None:
        """Begin to load the model, unless it is in memory or being loaded.

        Raises:
            NoRoomError: 503: running requests use the memory.
            ApiError: the model has failed to load, or its files are missing.
        """
        self.state.refuse_when_stopping()
        if entry.service is not None or entry.task is not None:
            return
        if entry.state == "failed":
            raise load_error(entry)
        await self._check_room(entry)
        if entry.task is None and entry.service is None:
            entry.error, entry.progress = None, LoadProgress()
            entry.state = "loading" if entry.state == "unloaded" else entry.state
            entry.task = self._start(self._load(entry))

    async def load(self, entry: Entry) -> Service:
        """Return the model in memory. All requests for it wait for one loading; raises as `start_loading`."""
        while entry.service is None:
            await self.start_loading(entry)
            if (task := entry.task) is not None:
                while not task.done():
                    await asyncio.wait((task,), timeout=LOOK_AGAIN_S)
                    self.state.refuse_when_stopping()
                task.result()
        return entry.service

    async def reload(self, entry: Entry) -> Service:
        """Load as `load` does, also if loading has failed before."""
        if entry.state == "failed":
            entry.state = "unloaded"
        return await self.load(entry)

    async def unload(self, entry: Entry) -> bool:
        """Unload the model. Return False if something needs it."""
        async with self._lock:
            if entry.may_go:
                await self._unload(entry)
        return entry.service is None

    async def forget(self, name: str | None, owner: str | None) -> None:
        """Drop an owner's prompts, or everybody's, of the named model or of all; its files also where it is not loaded.

        Raises:
            ApiError: 404: no such model.
            EngineError: some could not be deleted.
        """
        entries = self._named(name) or list(self)
        async with self._lock:  # none comes or goes meanwhile
            for entry in entries:
                if (service := entry.service) is not None:
                    service.tools.forget(owner)
                    await asyncio.to_thread(service.engine.drop_cached, None, owner)
                elif (folder := self._the_host.folder(entry)) is not None:
                    await asyncio.to_thread(_forget_files, folder, owner)

    def start(self) -> None:
        """Look at all models, and load the pinned ones."""
        if self.several:
            self._start(self._look_at_all())
        for entry in self:
            if entry.pin and entry.service is None:
                self._start(self._load_quietly(entry))

    async def _look_at_all(self) -> None:
        """Read all models' windows. Clients plan by a window before its model is in memory."""
        for entry in self:
            try:
                context = await asyncio.to_thread(self._the_host.context, entry)
            except Exception as error:  # noqa: BLE001 - a request for it gets the error; until then its window is unknown
                logger.warning("%s: %s", entry.id, error)
                entry.error = entry.error or reason_of(error)
                continue
            entry.context = entry.context or context

    async def close(self) -> None:
        """End every engine."""
        if self._host is not None:
            await asyncio.to_thread(self._host.close)
        for entry in self:
            if entry.timer is not None:
                entry.timer.cancel()
            if entry.service is not None:
                await asyncio.to_thread(entry.service.engine.close)

    # --- how they come and go ----------------------------------------------------------------------------------------

    async def _load(self, entry: Entry) -> None:
        failure: ApiError | None = None
        try:
            async with self._lock:
                entry.state = "loading"
                await self._make_room(entry)
                await self._bring(entry)
        except NoRoomError as error:
            entry.state, failure = "unloaded", error
        except (RequestCancelled, EngineClosedError):
            entry.state, failure = "unloaded", ApiError(503, "The server is shutting down.", code="engine_unavailable")
        except Exception as error:  # every kind: one model's failure must not end the others
            logger.exception("%s could not be loaded", entry.id)
            entry.state, entry.error = "failed", reason_of(error)
            failure = load_error(entry)
        finally:
            entry.task = None
        if failure is not None:  # out here the exception no longer keeps frames that hold half a model
            await asyncio.to_thread(self._the_host.release)
            raise failure.with_traceback(None)

    async def _bring(self, entry: Entry) -> None:
        def tell(progress: LoadProgress) -> None:
            entry.progress = progress

        begun = time.monotonic()
        engine = await asyncio.to_thread(self._the_host.load, entry, tell)
        entry.service = Service(engine, entry.settings, self.state, entry.metrics, entry.aliases)
        entry.metrics.engine = engine
        entry.state, entry.last_use, entry.loads = "loaded", time.monotonic(), entry.loads + 1
        entry.context = entry.service.context_length
        logger.info("%s is loaded, after %.1f s", entry.id, time.monotonic() - begun)
        self._watch(entry)

    async def _load_quietly(self, entry: Entry) -> None:
        try:
            await self.load(entry)
        except ApiError as error:
            logger.warning("%s", error)

    async def _unload(self, entry: Entry) -> None:
        """Unload a model while holding the lock. Any reference left behind would keep its memory."""
        service, entry.service = entry.service, None
        assert service is not None
        entry.state = "unloading"
        entry.metrics.engine = None
        service.prompts.workers.close()
        service.tools.forget(None)
        await asyncio.to_thread(_close, weakref.ref(service.engine))
        del service
        await asyncio.to_thread(self._the_host.release)
        entry.state = "unloaded"
        logger.info("%s is unloaded", entry.id)

    async def _check_room(self, entry: Entry) -> None:
        """Refuse a model that would not fit even without all models that may be unloaded, by an ApiError."""
        try:
            need, free = await asyncio.to_thread(self._the_host.need, entry), self._the_host.free()
        except MissingPairError as error:
            raise ApiError(
                404, f"The model {entry.id!r} is not on this machine: {error}", code="model_missing"
            ) from error
        except Exception as error:
            logger.exception("%s can't be loaded", entry.id)
            entry.state, entry.error = "failed", reason_of(error)
            raise load_error(entry) from None
        others = [other for other in self if other is not entry and (other.service or other.task) is not None]
        stay = [other for other in others if not other.may_go]
        room = None if free is None else free + sum(other.weights for other in others if other.may_go)
        if (why := self._short(need, stay, room)) is not None:
            if room is not None and room < need:
                self._refuse_for_ever(entry, need)
            raise NoRoomError(entry, why)

    def _refuse_for_ever(self, entry: Entry, need: int) -> None:
        limit, pinned = self._the_host.limit(), [other for other in self if other.pin and other is not entry]
        taken = sum(other.weights for other in pinned)
        if limit is not None and need + taken > limit:
            beside = f" beside {size(taken)} of {ids_of(pinned)}" if taken else ""
            entry.state, entry.error = (
                "failed",
                f"it needs {size(need)}, and the memory limit is {size(limit)}{beside}",
            )
            raise load_error(entry)

    async def _make_room(self, entry: Entry) -> None:
        """Unload the least recently used models until there is room."""
        need, until = await asyncio.to_thread(self._the_host.need, entry), time.monotonic() + PATIENCE_S
        while (why := self._short(need, self._loaded_beside(entry), self._the_host.free())) is not None:
            self._freed.clear()
            if (victim := self._least_recent()) is not None:
                await self._unload(victim)
            elif time.monotonic() < until:
                entry.progress = LoadProgress("Waiting for room")
                self.state.refuse_when_stopping()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), LOOK_AGAIN_S)
            else:
                raise NoRoomError(entry, why)

    def _short(self, need: int, there: Sequence[Entry], free: int | None) -> str | None:
        """Return why a model can't come beside those that are there, None if it can."""
        if len(there) >= self._max:
            return f"{ids_of(there)} can't be unloaded, and --max-models is {self._max}"
        if free is not None and free < need:
            return f"it needs {size(need)}, and what is in use leaves {size(max(0, free))}"
        return None

    def _loaded_beside(self, entry: Entry) -> list[Entry]:
        return [other for other in self if other.service is not None and other is not entry]

    def _least_recent(self) -> Entry | None:
        return min((entry for entry in self if entry.may_go), key=lambda entry: entry.last_use, default=None)

    def _make_room_for_requests(self, need: int) -> None:
        """Make room for requests that need the bytes of idle models. Called from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(lambda: self._start(self._relieve(need)))

    async def _relieve(self, need: int) -> None:
        async with self._lock:
            while (free := self._the_host.free()) is not None and free < need:
                victim = self._least_recent()
                if victim is None:
                    return
                logger.info("%s makes room for a request", victim.id)
                await self._unload(victim)

    def _watch(self, entry: Entry) -> None:
        """Unload the model when it has been idle for its `ttl`."""
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if entry.ttl is not None and entry.service is not None and not entry.pin and not entry.users:
            loop, left = asyncio.get_running_loop(), entry.ttl - entry.idle_s
            entry.timer = loop.call_later(left if left > 0 else LOOK_AGAIN_S, self._expire, entry)

    def _expire(self, entry: Entry) -> None:
        if entry.ttl is not None and entry.may_go and entry.idle_s >= entry.ttl:
            self._start(self._leave(entry))
        else:
            self._watch(entry)

    async def _leave(self, entry: Entry) -> None:
        await self.unload(entry)
        self._watch(entry)  # a request may have come in the meantime

    def _start(self, work: Any) -> asyncio.Task[None]:
        self._loop = asyncio.get_running_loop()
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # all waiting requests have it

    @property
    def _the_host(self) -> Loader:
        assert self._host is not None
        return self._host


def _forget_files(folder: Path, owner: str | None) -> None:
    try:
        forget_files(folder, owner)
    except OSError as error:
        raise EngineError(f"not all prompts could be deleted: {error}") from error


def _close(engine: weakref.ref[Engine]) -> None:
    """Close an engine on a thread of its own. A pool's thread would hold its arguments, and so the memory, too long."""
    there = engine()
    if there is not None:
        there.close()
