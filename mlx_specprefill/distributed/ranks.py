"""Agreement among the processes that run one model together.

All take the same steps in the same order. Rank 0 decides whatever depends on a clock, a client or chance, and sends it
to the others (`broadcast`). Memory or a cached prefix counts only if all have it (`min_max`). Numbers that every rank
computes are taken from rank 0, because machines may round differently (`broadcast_tokens`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import mlx.core as mx
import numpy as np

from ..arrays import Floats
from ..errors import LoadError
from .link import Link, RankInfo, rank_info

T = TypeVar("T")

_PACKAGES = ("mlx-specprefill", "mlx", "mlx-lm")


class Ranks(Link):
    """This process among those that run one model together.

    Everything except `assert_equal`, `on_lost` and `close` belongs to the MLX thread.

    Args:
        facts: values by name that have to be equal on all ranks.

    Attributes:
        group: MLX's, of all of them.
    """

    def __init__(self, info: RankInfo, timeout: float, facts: dict[str, str]) -> None:
        super().__init__(info, timeout)
        for name, fact in facts.items():
            self.assert_equal(name, fact)
        self.group = _mlx_group(info, timeout)
        self._own = int(self.leads)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, what: str, read: Callable[[], T]) -> T:
        """Return rank 0's value. The others don't call `read`.

        Args:
            what: name of the question, the same on all ranks.

        Raises:
            PeerLost: a process is gone, or asks another question.
        """
        if self.leads:
            value = read()
            self.send(what, value)
            return value
        question, value = self.receive()
        if question != what:
            raise self.lose_sync(f"rank {self.rank} asks for {what!r} where rank 0 sends {question!r}")
        return value

    def min_max(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest value (int32) of all ranks."""
        self._check()
        lowest = mx.distributed.all_min(mx.array([value, -value], dtype=mx.int32), group=self.group)
        low, high = np.array(lowest).tolist()
        return low, -high

    def all(self, fact: bool) -> bool:
        """Return whether the fact is true on all ranks."""
        return bool(self.min_max(int(fact))[0])

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        """Return rank 0's token ids, of any shape, not evaluated."""
        self._check()
        return mx.distributed.all_sum(tokens * mx.array(self._own, dtype=tokens.dtype), group=self.group)

    def all_sum(self, values: Floats) -> Floats:
        """Return the sum over all ranks."""
        self._check()
        return np.array(mx.distributed.all_sum(mx.array(values), group=self.group))

    def all_max(self, values: mx.array) -> mx.array:
        """Return the highest value of all ranks, elementwise, not evaluated."""
        self._check()
        return mx.distributed.all_max(values, group=self.group)

    def all_gather(self, values: mx.array) -> mx.array:
        """Return the values of all ranks along the first axis, not evaluated."""
        self._check()
        return mx.distributed.all_gather(values, group=self.group)

    def fail_together(self, error: Exception) -> None:
        """Check that all ranks failed alike, if the work goes on without the failed part.

        Raises:
            PeerLost: a process is gone, or has not failed.
        """
        try:
            self.assert_equal("failure", type(error).__name__)
        except LoadError as difference:
            raise self.lose_sync(f"{difference}; here: {error}") from error

    def fail(self, error: Exception) -> None:
        """End all ranks, because this one is out of sync.

        Raises:
            PeerLost: always.
        """
        raise self.lose_sync(f"{type(error).__name__}: {error}") from error


def broadcast(ranks: Ranks | None, what: str, read: Callable[[], T]) -> T:
    """Return rank 0's value, or the value read here if there is one process. See `Ranks.broadcast`."""
    return read() if ranks is None else ranks.broadcast(what, read)


def refuse_together(ranks: Ranks | None, refusal: str | None) -> str | None:
    """Return a refusal on every rank if one has one, None if none has. Called on all ranks."""
    if ranks is None or ranks.all(refusal is None):
        return refusal
    return refusal or "another machine refuses it; its log says why"


def join_ranks(timeout: float = 60.0, facts: dict[str, str] | None = None) -> Ranks | None:
    """Join the processes that `mlx.launch` has started with this one; return None if it was started alone.

    Args:
        timeout: seconds to wait for the others, and seconds of silence after which one counts as lost.
        facts: values by name that have to be equal on all ranks, besides the packages' versions.

    Raises:
        LoadError: a rank is missing or differs, or MLX's own connection fails.
        SettingsError: the environment holds no address of rank 0.
    """
    info = rank_info()
    if info is None:
        return None
    return Ranks(info, timeout, {f"version of {name}": _version(name) for name in _PACKAGES} | (facts or {}))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _mlx_group(info: RankInfo, timeout: float) -> mx.distributed.Group:
    """Make MLX's group with a time limit; MLX has none."""
    results: list[mx.distributed.Group | Exception] = []

    def init() -> None:
        try:
            results.append(mx.distributed.init(strict=True))
        except Exception as error:  # noqa: BLE001 - it is raised by the caller
            results.append(error)

    thread = threading.Thread(target=init, name="mlx-specprefill-init", daemon=True)
    thread.start()
    thread.join(timeout)
    slow = LoadError(f"MLX's connection between the ranks did not come about in {timeout:.0f} s")
    group = results[0] if results else slow
    if isinstance(group, Exception):
        raise LoadError(f"{info.name(info.rank)}: {group}") from group
    if (group.rank(), group.size()) != (info.rank, info.size):
        raise LoadError(
            f"MLX is rank {group.rank()} of {group.size()}, the environment says rank {info.rank} of {info.size}"
        )
    return group
