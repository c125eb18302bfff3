"""Rank of a process among those that `mlx.launch` has started, from its environment."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsError

__all__ = ["CONTROL_VARIABLE", "KEY_VARIABLE", "Place", "place"]

CONTROL_VARIABLE = "MLX_SPECPREFILL_CONTROL"
KEY_VARIABLE = "MLX_SPECPREFILL_RANK_KEY"
_NO_CONTROL = f"rank 0's address is not known: set {CONTROL_VARIABLE} to HOST:PORT on all machines (mlx.launch --env)"


@dataclass(frozen=True, slots=True)
class Place:
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


def place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place of this process; None if it runs alone.

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
    key = environ.get(KEY_VARIABLE) or "\0".join([*hosts, str(size), str(address)])
    return Place(int(rank), size, address, tuple(hosts), hashlib.sha256(key.encode()).digest())


Found = tuple[int, tuple[str, int] | None, Sequence[str]]


def _ring(environ: Mapping[str, str]) -> Found | None:
    """Read the ring's file with each rank's addresses. The port before rank 0's first one is assumed to be free."""
    nodes = _listed(environ.get("MLX_HOSTFILE"))
    if not nodes:
        return None
    host, port = _address(nodes[0][0])
    return len(nodes), (host, port - 1), [_address(node[0])[0] for node in nodes]


def _jaccl(environ: Mapping[str, str]) -> Found | None:
    devices = _listed(environ.get("MLX_IBV_DEVICES"))
    if not devices or "MLX_JACCL_COORDINATOR" not in environ:
        return None
    host, port = _address(environ["MLX_JACCL_COORDINATOR"])
    return len(devices), (host, port - 1), [host]


def _nccl(environ: Mapping[str, str]) -> Found | None:
    if "NCCL_HOST_IP" not in environ or "MLX_WORLD_SIZE" not in environ:
        return None
    host = environ["NCCL_HOST_IP"]
    return int(environ["MLX_WORLD_SIZE"]), (host, int(environ.get("NCCL_PORT", "12345")) - 1), [host]


def _mpi(environ: Mapping[str, str]) -> Found | None:
    size = environ.get("OMPI_COMM_WORLD_SIZE")
    return None if size is None else (int(size), None, ())


def _listed(file: str | None) -> list[Any]:
    if not file or not Path(file).is_file():
        return []
    text = Path(file).read_text(encoding="utf-8").strip()
    found = json.loads(text) if text else []
    return found if isinstance(found, list) else []


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingsError(f"{text!r} is no address: HOST:PORT is expected")
    return host, int(port)
