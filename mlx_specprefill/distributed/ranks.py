"""Agreement among the processes that run one model together, by MLX's collectives alone.

All take the same steps in the same order. Rank 0 decides whatever depends on a clock, a client or chance, and sends it
to the others (`broadcast`). Memory or a cached prefix counts only if all have it (`min_max`). Numbers that every rank
computes are taken from rank 0, because machines may round differently (`broadcast_tokens`). A process that can't go on
with the others ends, and what has started it ends them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import time
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NoReturn, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import __version__
from ..arrays import Floats
from ..errors import LoadError

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
log = logging.getLogger(__name__)

_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")  # in the environment of each process
_QUESTION, _HEAD = 4, 8  # bytes of a question's checksum; with those of the length of its data
_SHORT = 56  # bytes of data that are sent with the question, in one collective
_END_STATUS = 1


class Ranks:
    """This process among those that run one model together.

    Everything belongs to the MLX thread, once there is one.

    Args:
        group: MLX's, of all of them.

    Attributes:
        rank, size: this process among all.
    """

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._own = int(self.leads)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def broadcast(self, what: str, read: Callable[[], T]) -> T:
        """Return rank 0's value. The others don't call `read`. All end if one asks another question.

        Args:
            what: name of the question, the same on all ranks.
        """
        if not self.leads:
            value: T = pickle.loads(self._send(what, b""))
            return value
        value = read()
        self._send(what, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
        return value

    def min_max(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest value (int32) of all ranks."""
        low, high = self._compute(mx.distributed.all_min, np.array([value, -value], np.int32)).tolist()
        return low, -high

    def all(self, fact: bool) -> bool:
        """Return whether the fact is true on all ranks."""
        return bool(self.min_max(int(fact))[0])

    def all_sum(self, values: Floats) -> Floats:
        """Return the sum over all ranks."""
        return self._compute(mx.distributed.all_sum, values)

    def broadcast_tokens(self, tokens: mx.array) -> mx.array:
        """Return rank 0's token ids, of any shape, not evaluated."""
        return mx.distributed.all_sum(tokens * mx.array(self._own, dtype=tokens.dtype), group=self.group)

    def all_max(self, values: mx.array) -> mx.array:
        """Return the highest value of all ranks, elementwise, not evaluated."""
        return mx.distributed.all_max(values, group=self.group)

    def all_gather(self, values: mx.array) -> mx.array:
        """Return the values of all ranks along the first axis, not evaluated."""
        return mx.distributed.all_gather(values, group=self.group)

    def assert_equal(self, what: str, value: str) -> None:
        """Check that all ranks have rank 0's value.

        Raises:
            LoadError: a rank has another value; all ranks raise.
        """
        heads = self._ask(what, hashlib.blake2b(value.encode(), digest_size=_SHORT).digest())
        others = [rank for rank in range(self.size) if (heads[rank] != heads[0]).any()]
        if others:
            raise LoadError(f"rank {others[0]} has another {what} than rank 0; rank {self.rank} has {value!r}")

    def fail_together(self, error: Exception) -> None:
        """Check that all ranks failed alike, if the work goes on without the failed part. They end if one did not."""
        self._ask(f"failure: {type(error).__name__}", b"", f": {error}")

    def end(self, why: str) -> NoReturn:
        """End this process at once: the others wait for it, or it would wait for them for ever."""
        log.critical("rank %d of %d ends: %s", self.rank, self.size, why)
        logging.shutdown()
        os._exit(_END_STATUS)

    def _send(self, what: str, data: bytes) -> bytes:
        """Return rank 0's data on every rank."""
        head = self._ask(what, data)[0]
        length = int.from_bytes(head[_QUESTION:_HEAD].tobytes(), "little")
        if length <= _SHORT:
            return bytes(head[_HEAD : _HEAD + length])
        return bytes(self._compute(mx.distributed.all_sum, np.frombuffer(data.ljust(length, b"\0"), np.uint8)))

    def _ask(self, what: str, data: bytes, more: str = "") -> Bytes:
        """Return each rank's question, the length of its data, and the data if it is short. All end if they differ in
        the question.

        Args:
            more: words for the log then.
        """
        head = zlib.crc32(what.encode()).to_bytes(4, "little") + len(data).to_bytes(4, "little")
        own = np.frombuffer((head + data[:_SHORT]).ljust(_HEAD + _SHORT, b"\0"), np.uint8)
        heads = self._compute(mx.distributed.all_gather, own[None])
        if (heads[:, :_QUESTION] != heads[0, :_QUESTION]).any():
            self.end(f"another rank does something else than {what!r}{more}")
        return heads

    def _compute(self, collective: Callable[..., mx.array], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the result of a collective. Without the other ranks this one ends."""
        result = collective(mx.array(values), group=self.group)
        try:
            mx.eval(result)  # NumPy would not hear of the error
        except RuntimeError as error:
            self.end(f"another rank is gone: {error}")
        return np.array(result)


def broadcast(ranks: Ranks | None, what: str, read: Callable[[], T]) -> T:
    """Return rank 0's value, or the value read here if there is one process. See `Ranks.broadcast`."""
    return read() if ranks is None else ranks.broadcast(what, read)


def refuse_together(ranks: Ranks | None, refusal: str | None) -> str | None:
    """Return a refusal on every rank if one has one, None if none has. Called on all ranks."""
    if ranks is None or ranks.all(refusal is None):
        return refusal
    return refusal or "another machine refuses it; its log says why"


def join_ranks(timeout: float = 60.0, facts: Mapping[str, str] | None = None) -> Ranks | None:
    """Join the processes that `mlx.launch` has started with this one; return None if it was started alone.

    Called on the main thread, which alone hears signals.

    Args:
        timeout: seconds to wait for the others.
        facts: values by name that have to be equal on all ranks, besides the packages' versions.

    Raises:
        LoadError: a rank is missing or differs.
    """
    if not any(name in os.environ for name in _VARIABLES):
        return None
    group = _mlx_group(timeout)
    if group.size() < 2:
        return None
    ranks = Ranks(group)
    versions = {"mlx-specprefill": __version__, **{name: version(name) for name in ("mlx", "mlx-lm")}}
    for name, fact in {**versions, **(facts or {})}.items():
        ranks.assert_equal(name, fact)
    return ranks


def _mlx_group(timeout: float) -> mx.distributed.Group:
    """Make MLX's group. It waits for other ranks without a limit of its own, but not beyond a signal."""
    until = time.monotonic() + timeout
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        return mx.distributed.init()
    except RuntimeError as error:
        where = "is every machine of the hostfile reachable, and did the program start there?"
        why = f"not all have come in {timeout:.0f} s" if time.monotonic() >= until else error
        raise LoadError(f"the ranks of this model don't find each other ({why}): {where}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
