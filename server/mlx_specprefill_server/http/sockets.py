"""The server's sockets, bound before anything is imported for it or loaded; a busy port; addresses for people."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address

import orjson

_PROBE_S = 0.5  # seconds for a program on this machine to answer
_HEALTH_BYTES = 64 << 10
_LAST_PORT = 65535
_ANOTHER = "another program listens there"


@contextlib.contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Return sockets on all addresses of a host. They refuse connections until `listen`; nobody else gets the port.

    Raises:
        OSError: names the address: another program has the port, or this machine doesn't have the address.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, address in _addresses(host, port):
            taken = sockets[0].getsockname()[1] if sockets else port  # one port for all, also if any port will do
            sockets.append(stack.enter_context(_bind(family, address, taken)))
        yield sockets


def listen(sockets: Sequence[socket.socket]) -> None:
    """Take connections from now on.

    Raises:
        OSError: names the address: another program has the port.
    """
    for listener in sockets:
        host, port = listener.getsockname()[:2]
        with _named(host, port):
            listener.listen()
        # Else what is left of its connections keeps the next start from the port. Set before, it would let others in.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def address(listener: socket.socket, reachable: bool = False) -> str:
    """Return the URL of a listening socket.

    Args:
        reachable: this machine's own name for it, where the socket listens at every address.
    """
    host, port = listener.getsockname()[:2]
    if reachable and ip_address(host.partition("%")[0]).is_unspecified:
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_exposed(sockets: Sequence[socket.socket]) -> bool:
    """Return whether other machines can reach one of the sockets."""
    return not all(ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback for listener in sockets)


def network_address(listener: socket.socket) -> str | None:
    """Return the URL for other machines of a socket that listens at every address; None if there is no network."""
    host, port = listener.getsockname()[:2]
    if not ip_address(host.partition("%")[0]).is_unspecified:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: the system chooses the address it would send from
        return f"http://{probe.getsockname()[0]}:{port}"
    return None


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, error.strerror, f"--host {host}") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in infos))


def _bind(family: int, address: str, port: int) -> socket.socket:
    if port and (program := _listening(family, address, port)) is not None:
        raise _refusal(errno.EADDRINUSE, address, port, program)
    listener = socket.socket(family, socket.SOCK_STREAM)
    with _named(address, port), ExitStack() as failing:
        failing.callback(listener.close)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # beside what is left of connections
            listener.bind((address, port))
        failing.pop_all()
    return listener


@contextlib.contextmanager
def _named(address: str, port: int) -> Iterator[None]:
    """Name the address in an OSError of its socket."""
    try:
        yield
    except OSError as error:
        raise _refusal(error.errno or 0, address, port) from error


def _refusal(number: int, address: str, port: int, other: str = _ANOTHER) -> OSError:
    """Return the error of an address, which names the other program where the port is taken."""
    reason = os.strerror(number)
    if number == errno.EADDRINUSE:
        reason += f" ({other}): choose another one, as --port {port + 1 if port < _LAST_PORT else port - 1}"
    return OSError(number, reason, f"--host {address} --port {port}")


def _listening(family: int, address: str, port: int) -> str | None:
    """Say which program listens at the address; None if none does.

    On macOS SO_REUSEADDR, which a restart needs, lets 127.0.0.1 be bound while another program listens at all
    addresses, or the other way round. One of the two then gets the other's clients.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        if probe.connect_ex((address, port)) != 0:
            return None
    connection = HTTPConnection(address, port, timeout=_PROBE_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException, ValueError, KeyError, TypeError):
        connection.request("GET", "/health")
        health = orjson.loads(connection.getresponse().read(_HEALTH_BYTES))
        return f"mlx-specprefill serves {health['model']} there, {health['running']} requests are running"
    return _ANOTHER
