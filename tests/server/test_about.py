"""The server's description of itself."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import __version__

from .conftest import client_of
from .fakes import FakeEngine


def test_the_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", ["/metrics", "/version"])
def test_the_key_is_needed(engine: FakeEngine, path: str) -> None:
    client = client_of(engine, api_keys=("right",))
    assert client.get(path).status_code == 401
    assert client.get(path, headers={"authorization": "Bearer right"}).status_code == 200
