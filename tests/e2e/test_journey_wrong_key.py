"""A key that the server does not know, at each door."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app
from tests.support.serving import start

from .conftest import PAIR
from .test_start import KNOWN


@pytest.mark.extended
def test_a_wrong_key_is_refused_and_the_right_one_is_not(tmp_path: Path) -> None:
    with start(tmp_path / "log", *PAIR, *KNOWN, "--api-key", "right") as server:
        assert httpx.get(f"{server.base}/health").status_code == 200
        assert httpx.get(server.base).status_code == 200, "the page asks for the key itself"
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            for path in ("/v1/chat/completions", "/chat/completions", "/v1/messages"):
                assert httpx.post(f"{server.base}{path}", json={}, headers=headers).status_code == 401
        for key, status in (("wrong", 2), ("right", 0)):
            done = CliRunner().invoke(app, ["connect", "anything", "--url", server.base, "--api-key", key])
            assert done.exit_code == status, done.output
        assert f"OPENAI_BASE_URL={server.base}/v1" in done.output
        assert "OPENAI_API_KEY=right" in done.output
