"""The control connection beside MLX's: its address, rank 0's decisions, heartbeats, and when a rank is lost.

MLX's collectives carry arrays. They have no time limit and don't report who is missing, and a process that waits in one
keeps a core busy. So rank 0 holds one TCP connection to every other rank for its decisions and for heartbeats in both
directions. Rank 0's messages are pickled, the others' are JSON: rank 0 serves clients, and accepts no code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from ..errors import LoadError, PeerLost, PeerLostError, SettingsError

CONTROL_VARIABLE = "MLX_SPECPREFILL_CONTROL"
RANK_KEY_VARIABLE = "MLX_SPECPREFILL_RANK_KEY"
_NO_CONTROL = f"rank 0's address is not known: set {CONTROL_VARIABLE} to HOST:PORT on all machines (mlx.launch --env)"

_Backend = tuple[int, tuple[str, int] | None, Sequence[str]]

log = logging.getLogger(__name__)
_BEATS = 4  # heartbeats within the timeout
_MISSED = 2  # missed heartbeats after which a process is the one that the others wait for
_RETRY_S = 0.1
_END, _BEAT = "end", "beat"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One of `size` processes.

    Attributes:
        control: address at which rank 0 listens, beside MLX's own connections.
        hosts: of the ranks, if known.
        key: secret with which the processes authenticate.
    """

    rank: int
    size: int
    control: tuple[str, int]
    hosts: tuple[str, ...]
    key: bytes

    def name(self, rank: int) -> str:
        """Return a rank and its machine for messages."""
        return f"rank {rank} ({self.hosts[rank]})" if rank < len(self.hosts) else f"rank {rank}"


def rank_info(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return the rank of this process; None if it runs alone.

    Raises:
        SettingsError: the environment shows other ranks, but no address of rank 0.
    """
    rank = environ.get("MLX_RANK", environ.get("OMPI_COMM_WORLD_RANK"))
    if rank is None:
        return None
    size, address, hosts = _ring(environ) or _jaccl(environ) or _nccl(environ) or _mpi(environ) or (1, None, ())
    if size < 2:
        return None
    if CONTROL_VARIABLE in environ:
        address = _address(environ[CONTROL_VARIABLE])
    if address is None:
        raise SettingsError(_NO_CONTROL)
    key = environ.get(RANK_KEY_VARIABLE) or "\0".join([*hosts, str(size), str(address)])
    return RankInfo(int(rank), size, address, tuple(hosts), hashlib.sha256(key.encode()).digest())


def _ring(environ: Mapping[str, str]) -> _Backend | None:
    """Read the ring's file with each rank's addresses. The port before rank 0's first one is assumed to be free."""
    nodes = _read_list(environ.get("MLX_HOSTFILE"))
    if not nodes:
        return None
    host, port = _address(nodes[0][0])
    return len(nodes), (host, port - 1), [_address(node[0])[0] for node in nodes]


def _jaccl(environ: Mapping[str, str]) -> _Backend | None:
    devices = _read_list(environ.get("MLX_IBV_DEVICES"))
    if not devices or "MLX_JACCL_COORDINATOR" not in environ:
        return None
    host, port = _address(environ["MLX_JACCL_COORDINATOR"])
    return len(devices), (host, port - 1), [host]


def _nccl(environ: Mapping[str, str]) -> _Backend | None:
    if "NCCL_HOST_IP" not in environ or "MLX_WORLD_SIZE" not in environ:
        return None
    host = environ["NCCL_HOST_IP"]
    return int(environ["MLX_WORLD_SIZE"]), (host, int(environ.get("NCCL_PORT", "12345")) - 1), [host]


def _mpi(environ: Mapping[str, str]) -> _Backend | None:
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    return None if size is None else (int(size), None, ())


def _read_list(file: str | None) -> list[Any]:
    if not file or not Path(file).is_file():
        return []
    text = Path(file).read_text(encoding="utf-8").strip()
    nodes = json.loads(text) if text else []
    return nodes if isinstance(nodes, list) else []


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"{text!r} is no address: HOST:PORT is expected")
    return host, int(port)


@dataclass(eq=False)
class _Peer:
    """State of the connection to another process.

    Attributes:
        seen: time of its last message, by the monotonic clock.
        messages: its messages except heartbeats; None: the connection has ended.
    """

    rank: int
    connection: Connection
    seen: float = field(default_factory=time.monotonic)
    messages: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: bytes) -> None:
        with self.lock:
            self.connection.send_bytes(message)


class Link:
    """Rank 0's connections to all others, or another rank's to rank 0.

    Args:
        timeout: seconds to wait for the others, and seconds of silence after which one counts as lost.

    Attributes:
        rank, size: this process among all.
        lost: the error of the lost rank, if one is lost; nothing can be computed any more.
    """

    def __init__(self, info: RankInfo, timeout: float) -> None:
        """
        Raises:
            LoadError: a rank did not come in time.
        """
        deadline = time.monotonic() + timeout
        peers = [_call(info, deadline)] if info.rank else _receive(info, deadline)
        self.info = info
        self.rank = info.rank
        self.size = info.size
        self.timeout = timeout
        self.lost: PeerLostError | None = None
        self._peers = {peer.rank: peer for peer in peers}
        self._calls: list[Callable[[PeerLostError], None]] = []
        self._losing = threading.Lock()
        self._gone = threading.Event()
        self._closed = False
        self._beat: Callable[[], float] | None = None
        for peer in peers:
            self._thread(f"listen-{peer.rank}", self._listen, peer)
        self._thread("beat", self._send_beats)
        self._thread("watch", self._watch)

    def _thread(self, name: str, call: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=call, args=args, name=f"mlx-specprefill-{name}", daemon=True).start()

    # --- decisions of rank 0 -----------------------------------------------------------------------------------------

    def send(self, what: str, value: Any) -> None:
        """Send a value from rank 0 to all others.

        Raises:
            PeerLost: one is gone.
        """
        message = pickle.dumps((what, value), protocol=pickle.HIGHEST_PROTOCOL)
        self._check()
        for peer in self._peers.values():
            try:
                peer.send(message)
            except OSError as error:
                raise self._lose(peer.rank, f"its connection is closed ({error})") from error

    def receive(self) -> tuple[str, Any]:
        """Receive rank 0's next value.

        Raises:
            PeerLost: it is gone.
        """
        message = self._peers[0].messages.get()
        if message is None:
            self._gone.wait(self.timeout)
            self._check()
            raise self._lose(0, "it has ended")
        value: tuple[str, Any] = message
        return value

    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have rank 0's value.

        Raises:
            LoadError: a rank has another value; all ranks raise.
            PeerLost: a process is gone.
        """
        if self.rank:
            try:
                self._peers[0].send(json.dumps({"same": what, "value": value}).encode())
            except OSError as error:
                raise self._lose(0, f"its connection is closed ({error})") from error
            question, verdict = self.receive()
            if question != "same":
                raise self.lose_sync(f"rank {self.rank} compares its {what} where rank 0 sends {question!r}")
        else:
            verdict = self._first_difference(what, value)
            self.send("same", verdict)
        if verdict is not None:
            raise LoadError(verdict)

    def _first_difference(self, what: str, value: str) -> str | None:
        for peer in self._peers.values():
            answer = peer.messages.get()
            if answer is None:
                self._gone.wait(self.timeout)
                self._check()
            elif answer.get("same") != what or answer.get("value") != value:
                name = self.info.name(peer.rank)
                return f"{name} has another {what} than rank 0: {answer.get('value')!r}, not {value!r}"
        return None

    # --- heartbeats --------------------------------------------------------------------------------------------------

    def watch(self, beat: Callable[[], float] | None) -> None:
        """Count a process as lost from now on if a step takes longer than the timeout.

        Args:
            beat: returns when the MLX thread last finished a step, by the monotonic clock; None: it has ended.
        """
        self._beat = beat

    def on_lost(self, call: Callable[[PeerLostError], None]) -> None:
        """Call the function once a process is lost, on its own thread."""
        self._calls.append(call)

    def lose_sync(self, why: str) -> PeerLost:
        """Report that the processes are out of sync."""
        return self._lose(self.rank, why)

    def close(self) -> None:
        """Let the others end without an error. Later errors are ignored."""
        if self._closed:
            return
        self._closed = True
        for peer in self._peers.values():
            with suppress(OSError):
                peer.send(pickle.dumps((_END, None)) if self.rank == 0 else json.dumps({_END: True}).encode())

    def _listen(self, peer: _Peer) -> None:
        read = pickle.loads if self.rank else json.loads
        while True:
            try:
                message = read(peer.connection.recv_bytes())
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                self._lose(peer.rank, "its process has ended or its machine can't be reached")
                break
            peer.seen = time.monotonic()
            kind = message[0] if self.rank else next(iter(message))
            if kind == _END:
                self._closed = True
                break
            if kind != _BEAT:
                peer.messages.put(message)
        peer.messages.put(None)

    def _send_beats(self) -> None:
        message = json.dumps({_BEAT: True}).encode() if self.rank else pickle.dumps((_BEAT, None))
        while not self._closed and self.lost is None:
            for peer in self._peers.values():
                with suppress(OSError):  # the listener reports the error
                    peer.send(message)
            time.sleep(self.timeout / _BEATS)

    def _watch(self) -> None:
        while not self._closed and self.lost is None:
            time.sleep(self.timeout / _BEATS)
            now, beat = time.monotonic(), self._beat
            waited = now - beat() if beat is not None else 0.0
            stuck = waited > self.timeout
            for peer in self._peers.values():
                silent = now - peer.seen
                if silent > self.timeout or (stuck and silent > self.timeout * _MISSED / _BEATS):
                    self._lose(peer.rank, f"it has been silent for {silent:.0f} s")
            if stuck:
                since = f"the {self.size} ranks have waited for each other for {waited:.0f} s"
                self._lose(self.rank, "", f"{since}: one of them hangs, or a connection between two of them")

    def _check(self) -> None:
        if self.lost is not None:
            raise PeerLost(self.lost)

    def _lose(self, rank: int, why: str, words: str | None = None) -> PeerLost:
        """Record the first loss; later ones follow from it.

        Args:
            words: the whole message, if the rank is unknown.
        """
        with self._losing:
            first = self.lost is None and not self._closed
            if self.lost is None:
                self.lost = PeerLostError(rank, words or f"{self.info.name(rank)} is lost: {why}")
        if first:
            log.error("%s", self.lost)
            self._gone.set()
            for peer in self._peers.values():
                peer.messages.put(None)
            for call in self._calls:
                self._thread("lost", call, self.lost)
        return PeerLost(self.lost)


# --- connection setup -------------------------------------------------------------------------------------------------


def _call(info: RankInfo, deadline: float) -> _Peer:
    """Connect from another rank to rank 0."""
    while True:
        try:
            connection = Client(info.control, authkey=info.key)
            break
        except AuthenticationError as error:
            raise LoadError(f"{info.name(0)} has another hostfile or key than {info.name(info.rank)}") from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                where = f"{info.control[0]}:{info.control[1]}"
                raise LoadError(f"{info.name(0)} can't be reached at {where}: {error}") from error
            time.sleep(_RETRY_S)
    _at_once(connection)
    connection.send_bytes(json.dumps({"rank": info.rank}).encode())
    return _Peer(0, connection)


def _receive(info: RankInfo, deadline: float) -> list[_Peer]:
    """Accept connections of all others on rank 0."""
    try:
        listener = Listener(info.control, backlog=info.size, authkey=info.key)
    except OSError as error:
        where = f"{info.control[0]}:{info.control[1]}"
        raise LoadError(f"rank 0 can't listen at {where} for the other ranks: {error.strerror or error}") from error
    peers: dict[int, _Peer] = {}
    done = threading.Event()

    def accept() -> None:
        while len(peers) < info.size - 1:
            with suppress(OSError, EOFError, AuthenticationError, ValueError, KeyError):
                connection = listener.accept()
                _at_once(connection)
                rank = int(json.loads(connection.recv_bytes())["rank"])
                if 0 < rank < info.size:
                    peers[rank] = _Peer(rank, connection)
            if done.is_set():
                return
        done.set()

    threading.Thread(target=accept, name="mlx-specprefill-accept", daemon=True).start()
    complete = done.wait(max(0.0, deadline - time.monotonic()))
    done.set()
    listener.close()
    if not complete:
        missing = [info.name(rank) for rank in range(1, info.size) if rank not in peers]
        raise LoadError(f"{' and '.join(missing)} did not come: is the machine reachable, and the program there?")
    return [peers[rank] for rank in sorted(peers)]


def _at_once(connection: Connection) -> None:
    """Send small messages without waiting for earlier acknowledgements."""
    with socket.socket(fileno=os.dup(connection.fileno())) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
