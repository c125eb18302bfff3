"""The server's sockets, bound before models are loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from ipaddress import ip_address

__all__ = ["address", "bound_sockets", "is_exposed"]

_PROBE_S = 0.5  # seconds for a program on this machine to answer


@contextlib.contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Return sockets on all addresses of a host. They refuse connections until the server listens.

    Raises:
        OSError: names the address: another program has the port, or this machine doesn't have the address.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, address in _addresses(host, port):
            taken = sockets[0].getsockname()[1] if sockets else port  # one port for all, also if any port will do
            sockets.append(stack.enter_context(_bind(family, address, taken)))
        yield sockets


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


def _addresses(host: str, port: int) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise OSError(errno.EADDRNOTAVAIL, error.strerror, f"--host {host}") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind(family: int, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port and _is_in_use(family, address, port):
            raise OSError(errno.EADDRINUSE, "")
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, os.strerror(error.errno or 0), f"--host {address} --port {port}") from error
    return listener


def _is_in_use(family: int, address: str, port: int) -> bool:
    """Return whether another program listens at the address.

    On macOS SO_REUSEADDR, which a restart needs, lets 127.0.0.1 be bound while another program listens at all
    addresses, or the other way round. One of the two then gets the other's clients.
    """
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        return probe.connect_ex((address, port)) == 0
