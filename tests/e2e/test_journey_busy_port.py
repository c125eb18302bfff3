"""Another program has the port."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from .test_start import refused


@pytest.mark.extended
def test_a_taken_port_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused(log, "--port", str(port))
    assert f"error: --host 127.0.0.1 --port {port}: Address already in use (another program" in said
    assert "Loading" not in said
