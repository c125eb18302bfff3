"""The address is taken before anything listens on it."""

from __future__ import annotations

import errno
import socket

import pytest

from mlx_specprefill_server.connections import bound_sockets, is_exposed


def test_a_free_port_is_one_for_all_addresses_of_a_host() -> None:
    with bound_sockets("localhost", 0) as sockets:
        assert len({listener.getsockname()[1] for listener in sockets}) == 1
        assert not is_exposed(sockets)
        port = sockets[0].getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(sockets[0].getsockname()[:2], timeout=60)
    with bound_sockets("127.0.0.1", port):
        pass


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught, bound_sockets("127.0.0.1", port):
            pass
    assert (caught.value.errno, caught.value.filename) == (errno.EADDRINUSE, f"--host 127.0.0.1 --port {port}")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_macos_would_share_is_taken(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There two programs can have a port, one at all addresses and one at a single one."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)
        with pytest.raises(OSError, match="in use") as caught, bound_sockets(host, port):
            pass
    assert caught.value.errno == errno.EADDRINUSE


def test_a_host_that_is_not_this_machine_is_named() -> None:
    with pytest.raises(OSError, match="no-such-host") as caught, bound_sockets("no-such-host.invalid", 0):
        pass
    assert caught.value.filename == "--host no-such-host.invalid"


def test_every_address_is_exposed() -> None:
    with bound_sockets("0.0.0.0", 0) as sockets:
        assert is_exposed(sockets)
