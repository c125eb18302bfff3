"""Joins a process to the others that run a model together."""

from __future__ import annotations

import threading
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from ..errors import LoadError
from .link import connect
from .place import Place, place
from .ranks import Ranks

__all__ = ["join_ranks"]

_PACKAGES = ("mlx-specprefill", "mlx", "mlx-lm")


def join_ranks(timeout: float = 60.0, facts: dict[str, str] | None = None) -> Ranks | None:
    """Join the processes that `mlx.launch` has started with this one; return None if it was started alone.

    Args:
        timeout: seconds to wait for the others, and seconds of silence after which one counts as lost.
        facts: values by name that have to be equal on all ranks, besides the packages' versions.

    Raises:
        LoadError: a rank is missing or differs, or MLX's own connection fails.
        SettingsError: the environment holds no address of rank 0.
    """
    found = place()
    if found is None:
        return None
    link = connect(found, timeout, {f"version of {name}": _version(name) for name in _PACKAGES} | (facts or {}))
    return Ranks(link, _mlx_group(found, timeout))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _mlx_group(place: Place, timeout: float) -> mx.distributed.Group:
    """Make MLX's group with a time limit; MLX has none."""
    found: list[mx.distributed.Group | Exception] = []

    def init() -> None:
        try:
            found.append(mx.distributed.init(strict=True))
        except Exception as error:  # noqa: BLE001 - it is raised by the caller
            found.append(error)

    thread = threading.Thread(target=init, name="mlx-specprefill-init", daemon=True)
    thread.start()
    thread.join(timeout)
    slow = LoadError(f"MLX's connection between the ranks did not come about in {timeout:.0f} s")
    group = found[0] if found else slow
    if isinstance(group, Exception):
        raise LoadError(f"{place.name(place.rank)}: {group}") from group
    if (group.rank(), group.size()) != (place.rank, place.size):
        raise LoadError(
            f"MLX is rank {group.rank()} of {group.size()}, the environment says rank {place.rank} of {place.size}"
        )
    return group
