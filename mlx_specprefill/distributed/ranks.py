"""What the processes that run one model together have to agree on.

All of them take the same steps in the same order. Rank 0 decides whatever depends on a clock, a client or chance, and
tells the others (`agree`); what each of them must have, memory or a cached prefix, counts where all have it (`range`);
numbers that are computed on every rank are rank 0's, because machines may round differently (`tokens`, `floats`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..errors import LoadError, PeerLost, PeerLostError
from .link import Link

__all__ = ["ALONE", "Group", "Ranks"]

T = TypeVar("T")


class Ranks:
    """One process alone: it agrees with itself.

    Attributes:
        rank, size: this process among those that run the model.
        lost: which rank is gone, once one is; nothing can be computed any more.
    """

    rank = 0
    size = 1
    lost: PeerLostError | None = None

    @property
    def several(self) -> bool:
        return self.size > 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, what: str, read: Callable[[], T]) -> T:
        """What rank 0 reads; the others don't.

        Args:
            what: names the question, the same on all ranks.

        Raises:
            PeerLost: a process is gone, or asks another question.
        """
        return read()

    def range(self, value: int) -> tuple[int, int]:
        """The lowest and the highest value (int32) of all ranks."""
        return value, value

    def every(self, fact: bool) -> bool:
        """Whether it is so on all ranks."""
        return bool(self.range(int(fact))[0])

    def tokens(self, tokens: mx.array) -> mx.array:
        """Rank 0's token ids, of any shape; not evaluated."""
        return tokens

    def floats(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Rank 0's numbers."""
        return values

    def total(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The sum over all ranks."""
        return values

    def highest(self, values: mx.array) -> mx.array:
        """The highest of all ranks, of each value; not evaluated."""
        return values

    def gathered(self, values: mx.array) -> mx.array:
        """Those of all ranks, one behind the other along the first axis; not evaluated."""
        return values

    def same(self, what: str, value: str) -> None:
        """
        Raises:
            LoadError: another rank has another value.
        """

    def together(self, error: Exception) -> None:
        """Something failed on the MLX thread, and the work goes on without it: on all ranks, or on none.

        Raises:
            PeerLost: a process is gone, or has not failed.
        """

    def fail(self, error: Exception) -> None:
        """This process can't go on as the others do.

        Raises:
            PeerLost: on one of several.
        """

    def on_lost(self, call: Callable[[PeerLostError], None]) -> None:
        """Call it once a process is lost, on a thread of its own."""

    def watch(self, beat: Callable[[], float] | None) -> None:
        """From now on, a step that takes longer than the peer timeout counts as a lost process.

        Args:
            beat: when the MLX thread last finished a step, by the monotonic clock; None: it has ended.
        """

    def close(self) -> None:
        """Let the others end, without an error."""


ALONE = Ranks()


class Group(Ranks):
    """A process among several. Everything but `same`, `on_lost` and `close` belongs to the thread that uses MLX.

    Args:
        link: to the other processes, beside MLX's connections.
        group: MLX's, of all of them.
    """

    def __init__(self, link: Link, group: mx.distributed.Group) -> None:
        self._link = link
        self.group = group
        self.rank = link.rank
        self.size = link.size
        self._own = int(self.leads)

    @property
    def lost(self) -> PeerLostError | None:  # type: ignore[override]
        return self._link.lost

    def agree(self, what: str, read: Callable[[], T]) -> T:
        if self.leads:
            value = read()
            self._link.tell(what, value)
            return value
        told, heard = self._link.hear()
        if told != what:
            raise self._link.differ(f"rank {self.rank} asks for {what!r} where rank 0 tells {told!r}")
        return heard  # type: ignore[no-any-return]

    def range(self, value: int) -> tuple[int, int]:
        self._check()
        lowest = mx.distributed.all_min(mx.array([value, -value], dtype=mx.int32), group=self.group)
        low, high = np.array(lowest).tolist()
        return low, -high

    def tokens(self, tokens: mx.array) -> mx.array:
        self._check()
        return mx.distributed.all_sum(tokens * mx.array(self._own, dtype=tokens.dtype), group=self.group)

    def floats(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return self.total(values if self.leads else np.zeros_like(values))

    def total(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._check()
        return np.array(mx.distributed.all_sum(mx.array(values), group=self.group))

    def highest(self, values: mx.array) -> mx.array:
        self._check()
        return mx.distributed.all_max(values, group=self.group)

    def gathered(self, values: mx.array) -> mx.array:
        self._check()
        return mx.distributed.all_gather(values, group=self.group)

    def same(self, what: str, value: str) -> None:
        self._link.same(what, value)

    def together(self, error: Exception) -> None:
        try:
            self._link.same("failure", type(error).__name__)
        except LoadError as difference:
            raise self._link.differ(f"{difference}; here: {error}") from error

    def fail(self, error: Exception) -> None:
        raise self._link.differ(f"{type(error).__name__}: {error}") from error

    def _check(self) -> None:
        if (lost := self.lost) is not None:
            raise PeerLost(lost)

    def on_lost(self, call: Callable[[PeerLostError], None]) -> None:
        self._link.on_lost(call)

    def watch(self, beat: Callable[[], float] | None) -> None:
        self._link.watch(beat)

    def close(self) -> None:
        self._link.close()

    def __getstate__(self) -> Any:
        raise TypeError("a group of processes can't be pickled")
