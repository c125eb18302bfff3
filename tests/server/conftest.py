from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specprefill_server.http.connections import MAX_CONNECTIONS
from mlx_specprefill_server.running.process import Server, make_server
from mlx_specprefill_server.settings.server import Settings
from tests.support.application import app_over

from .fakes import FakeEngine


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


def client_of(engine: FakeEngine, **settings: Any) -> TestClient:
    """A client that sees a 500 as a client does, instead of the exception."""
    app = app_over(engine, Settings(**settings))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return client_of(engine)


def events(text: str) -> list[Any]:
    """The data events of a stream in order, [DONE] as it is."""
    blocks = [block for block in text.split("\n\n") if block.startswith("data: ")]
    return [block[6:] if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


@pytest.fixture
def live(engine: FakeEngine) -> Iterator[Callable[..., Any]]:
    """Starts a real server over the fake engine; the only way to see disconnects and signals."""
    with contextmanager(_live)(engine) as start:
        yield start


@pytest.fixture
def base(live: Callable[..., Any]) -> str:
    """The address of a real server over the fake engine, with the settings as they come."""
    return str(live()[0])


def _live(engine: FakeEngine) -> Iterator[Callable[..., tuple[str, Server]]]:
    running: list[tuple[Server, threading.Thread]] = []

    def start(connections: int = MAX_CONNECTIONS, **settings: Any) -> tuple[str, Server]:
        given = Settings(port=0, **settings)
        server = make_server(app_over(engine, given), given, connections)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}", server

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
