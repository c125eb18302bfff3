"""An agent meets a model whose template has no place for tools."""

from __future__ import annotations

import httpx
import pytest
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app
from tests.support.serving import Server

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.extended
def test_the_lack_of_tools_is_said_wherever_it_matters(server: Server) -> None:
    assert httpx.get(f"{server.base}/v1/models").json()["data"][0]["tools"]["definitions"] is False
    done = CliRunner().invoke(app, ["connect", "anything", "--url", server.base])
    assert "agents can't call any" in done.output
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL], "max_tokens": 2}
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200
    assert "the model does not see them" in answer.text
