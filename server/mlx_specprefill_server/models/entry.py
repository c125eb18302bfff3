"""A model that a server knows, loaded or not: its names in `models.toml`, its state and users, why it is refused."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..http.errors import ApiError
from ..monitoring.metrics import Metrics
from ..pairs import PairsError, Row
from ..settings.pair import make_settings
from ..settings.server import Settings
from .service import Service

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]

RETRY_AFTER_S = "5"
FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:,'\"]+/)*(?=[^\s/:,'\"])")  # the folders of an absolute path


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of loading: a step in words, and `done` of its `total` parts. The parts are 0 of 0 while unknown."""

    step: str = "Waiting"
    done: int = 0
    total: int = 0


@dataclass(eq=False)
class Entry:
    """A known model. Used on the event loop; the loading thread replaces `progress`.

    Attributes:
        id: its name for clients; `aliases` are further names; `name` is its name in the table.
        pin: it is loaded at the start of the server and stays in memory.
        ttl: idle seconds after which it is unloaded; None: it stays until its memory is needed.
        service: the loaded model, ready for requests; None: not in memory.
        context: largest number of tokens of prompt and answer, if known; memory may leave room for fewer.
        error: reason why it could not be loaded, or its window not be read.
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


class NoRoomError(ApiError):
    """A refusal to load a model while running requests use the memory it needs."""

    def __init__(self, entry: Entry, why: str) -> None:
        message = f"The model {entry.id!r} can't be loaded now: {why}. Try again when their requests have ended."
        super().__init__(503, message, code="no_room_for_model", headers={"Retry-After": RETRY_AFTER_S})


def reason_of(error: Exception) -> str:
    """Return the error's message without this machine's private folders. The log has the whole message."""
    return FOLDERS.sub("", str(error)) or type(error).__name__


def load_error(entry: Entry) -> ApiError:
    """Return the refusal of a model that could not be loaded. It is not retried automatically."""
    message = f"The model {entry.id!r} could not be loaded: {entry.error}. POST /v1/models/{entry.id}/load tries again."
    return ApiError(500, message, param="model", code="model_failed")


def ids_of(entries: Sequence[Entry]) -> str:
    """Return the models' ids as text."""
    return ", ".join(entry.id for entry in entries)


def entries_of(rows: Mapping[str, Row], file: Path, given: Mapping[str, Any]) -> list[Entry]:
    """Return the models with their settings. Shared settings come first, then the environment, then the model's row.

    Raises:
        PairsError: two models have the same id or alias.
    """
    entries = [_entry(name, row, given) for name, row in rows.items()]
    names: dict[str, str] = {}
    for entry in entries:
        for name in (entry.id, *entry.aliases):
            if names.setdefault(name, entry.name) != entry.name:
                raise PairsError(f"{file}: [{names[name]}] and [{entry.name}] are both called {name!r}")
    return entries


def _entry(name: str, row: Row, given: Mapping[str, Any]) -> Entry:
    alias = row.alias or name
    settings = make_settings(row.model_copy(update={"alias": alias}), **{**given, "model_alias": None})
    return Entry(alias, settings, name=name, aliases=tuple(row.aliases), pin=row.pin, ttl=row.ttl)
