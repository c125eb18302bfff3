"""The address is taken before anything listens on it."""

from __future__ import annotations

import errno
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from mlx_specprefill_server.http.sockets import bound_sockets, is_exposed, listen, network_address


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
    said = f"Address already in use (another program listens there): choose another one, as --port {port + 1}"
    assert caught.value.strerror == said


def test_nobody_gets_a_port_that_is_bound_and_not_yet_listened_on() -> None:
    with bound_sockets("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        with pytest.raises(OSError, match="in use"), bound_sockets("127.0.0.1", port):
            pass
        with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", port)):
            pass
        listen(sockets)


def test_a_restart_gets_the_port_that_its_last_connections_have_left() -> None:
    port = 0
    for _ in range(3):
        with bound_sockets("127.0.0.1", port) as sockets:
            port = sockets[0].getsockname()[1]
            listen(sockets)
            with socket.create_connection(("127.0.0.1", port), timeout=60):
                sockets[0].accept()[0].close()  # this end closes first, and is left


def test_a_port_on_which_this_project_serves_is_told_from_others() -> None:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok", "model": "demo", "running": 2}')

    with HTTPServer(("127.0.0.1", 0), Health) as ours:
        Thread(target=ours.serve_forever, daemon=True).start()
        with pytest.raises(OSError, match="mlx-specprefill serves demo there, 2 requests are running"):
            bound_sockets("127.0.0.1", ours.server_port).__enter__()
        ours.shutdown()


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
        reachable = network_address(sockets[0])
        if reachable is not None:  # this machine has a network
            assert reachable.endswith(f":{sockets[0].getsockname()[1]}")
            assert "0.0.0.0" not in reachable
    with bound_sockets("127.0.0.1", 0) as sockets:
        assert network_address(sockets[0]) is None
