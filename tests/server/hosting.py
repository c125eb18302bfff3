"""A server with several models over fake engines: loading takes as long as a test wants, and memory is a number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_specprefill import LoadError
from mlx_specprefill_server.models.entry import Entry, LoadProgress
from mlx_specprefill_server.models.loader import Tell
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.models.server_state import ServerState
from mlx_specprefill_server.pairs import MissingPairError
from mlx_specprefill_server.running.app import create_app
from mlx_specprefill_server.running.process import make_server
from mlx_specprefill_server.settings.server import Settings
from tests.support.waiting import eventually

from .fakes import FakeEngine, FakePair

WEIGHTS = 1100  # bytes of every fake engine


@dataclass
class FakeHost:
    """
    Attributes:
        room: bytes for models.
        broken, missing: models that can't be loaded.
        folders: of prefixes, by id.
        held_up: loading waits for it.
        loading: is set while a load is in work.
        loaded: ids in order; `ended` those of engines that were closed.
    """

    room: int | None = None
    broken: dict[str, str] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    held_up: threading.Event = field(default_factory=threading.Event)
    loading: threading.Event = field(default_factory=threading.Event)
    loaded: list[str] = field(default_factory=list)
    engines: dict[str, FakeEngine] = field(default_factory=dict)
    released: int = 0
    folders: dict[str, Path] = field(default_factory=dict)
    on_pressure: Callable[[int], None] = print

    def __post_init__(self) -> None:
        self.held_up.set()

    def call_on_pressure(self, call: Callable[[int], None]) -> None:
        self.on_pressure = call

    def need(self, entry: Entry) -> int:
        if entry.id in self.missing:
            raise MissingPairError(f"mlx-specprefill pull {entry.id} fetches it")
        return WEIGHTS

    def context(self, entry: Entry) -> int | None:
        if entry.id in self.missing:
            raise MissingPairError("not here")
        return 2048

    def free(self) -> int | None:
        return None if self.room is None else self.room - WEIGHTS * sum(e.alive for e in self.engines.values())

    def limit(self) -> int | None:
        return self.room

    def load(self, entry: Entry, tell: Tell) -> FakeEngine:
        tell(LoadProgress("Loading", 1, 2))
        self.loading.set()
        self.held_up.wait(30)
        self.loading.clear()
        if entry.id in self.broken:
            raise LoadError(self.broken[entry.id])
        self.loaded.append(entry.id)
        engine = self.engines[entry.id] = FakeEngine(FakePair(target_id=entry.id))
        engine.says(f"I am {entry.id}")
        return engine

    def folder(self, entry: Entry) -> Path | None:
        return self.folders.get(entry.id)

    def release(self) -> None:
        self.released += 1

    def close(self) -> None:
        for engine in self.engines.values():
            if engine.alive:
                engine.close()


def models_of(host: FakeHost, *entries: Entry, max_models: int | None = None, **settings: object) -> Models:
    return Models(ServerState(Settings.model_validate(settings)), entries, host, max_models)


def entry(name: str, *aliases: str, pin: bool = False, ttl: float | None = None) -> Entry:
    return Entry(name, Settings(model_alias=name), name=name, aliases=aliases, pin=pin, ttl=ttl)


@pytest.fixture
def host() -> Iterator[FakeHost]:
    made = FakeHost()
    yield made
    made.held_up.set()
    made.close()


@contextmanager
def running(host: FakeHost, models: Models, settings: Settings) -> Iterator[str]:
    """The address of a real server of these models; at its end what waits for a loading goes on."""
    server = make_server(create_app(models), settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert eventually(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    host.held_up.set()
    server.should_exit = True
    thread.join(60)
    assert not thread.is_alive()
