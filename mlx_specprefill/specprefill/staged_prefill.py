"""Prefill of a target in two parts: its first layers read the whole prompt, the others the kept tokens.

Nothing that the first layers compute is thrown away: a scorer lets them read the prompt, keeps what they pass on, and
when it is known which tokens are kept, the other layers go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..adapters.staged import StagedModel, UpperLayers
from ..request import Progress, TokenIds
from .sparse_prefill import prefill

__all__ = ["HiddenStates", "Reading", "prefill_upper"]

_Part = tuple[int, mx.array]  # index of the first token, hidden states (1, L, D)


class HiddenStates:
    """What the first layers pass on of a prompt's tokens. In a session it lies beside the caches, and is cut with them.

    Attributes:
        first: index below which nothing is kept as it is read.
        known: index below which the draft need not read anew for it: the other layers, or an earlier turn, have it.
        begin: index of the first token that was read for this prompt; -1 before.
        end: in a session, tokens that this stands for.
    """

    def __init__(self, first: int = 0, known: int | None = None) -> None:
        self.first = first
        self.known = first if known is None else known
        self.end = 0
        self.begin = -1
        self._parts: list[_Part] = []

    def keep(self, start: int, hidden: mx.array) -> None:
        """Hidden states (1, L, D) of the tokens from index `start` on, in the order in which they are read."""
        skipped = max(0, self.first - start)
        new = hidden[:, skipped:]
        if new.shape[1]:
            mx.eval(new)
            self._parts.append((start + skipped, new))
            self.begin = self.begin if self.begin >= 0 else start + skipped

    def covers(self, indices: npt.NDArray[np.int32]) -> bool:
        """Whether the states of all these prompt indices are here."""
        return sum(int(_within(part, indices).sum()) for part in self._parts) == indices.size

    def of(self, indices: npt.NDArray[np.int32]) -> mx.array:
        """Those of the prompt's indices (N,), ascending, which it covers: (1, N, D)."""
        found = [(part, indices[_within(part, indices)]) for part in self._parts]
        chosen = [states[:, mx.array(some - start)] for (start, states), some in found if some.size]
        return mx.concatenate(chosen, axis=1) if chosen else self._parts[0][1][:, :0]

    def put_before(self, other: HiddenStates) -> None:
        """Of the tokens before those that were read for this prompt, what `other` has."""
        own = [part for part in self._parts if part[0] >= self.begin]
        self._parts = [*_below(self.begin, other._parts), *own]

    def clear(self) -> None:
        self._parts.clear()

    @property
    def nbytes(self) -> int:
        return sum(int(states.nbytes) for _, states in self._parts)

    # --- as a part of a session --------------------------------------------------------------------------------------

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last n of the tokens that it stands for."""
        self.end -= n
        self._parts = _below(self.end, self._parts)
        return n

    def __deepcopy__(self, _: object) -> HiddenStates:
        """The arrays are never changed."""
        copied = HiddenStates(self.first, self.known)
        copied.end, copied.begin, copied._parts = self.end, self.begin, list(self._parts)
        return copied


def _within(part: _Part, indices: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    start, states = part
    return (indices >= start) & (indices < start + states.shape[1])


def _below(end: int, parts: Sequence[_Part]) -> list[_Part]:
    return [(start, states[:, : end - start]) for start, states in parts if start < end]


def prefill_upper(
    model: StagedModel,
    cache: list[Any],
    prompt: Sequence[int] | TokenIds,
    hidden: mx.array,
    kept: npt.NDArray[np.int32],
    step: int | Callable[[], int],
    offset: int = 0,
) -> Generator[Progress, None, mx.array]:
    """As `prefill` of the kept tokens, in the layers behind the first ones.

    Args:
        cache: positioned, of those layers alone.
        hidden: what the first layers passed on of the kept tokens, (1, N, D).
    """
    return prefill(Reading(model.upper, hidden), cache, prompt, kept, step, offset)


class Reading:
    """The upper layers as a model of tokens, whose hidden states (1, N, D) are known, in the order they are fed."""

    def __init__(self, upper: UpperLayers, hidden: mx.array) -> None:
        self._upper = upper
        self._hidden = hidden
        self._read = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        start, self._read = self._read, self._read + inputs.shape[1]
        return self._upper(inputs, self._hidden[:, start : self._read], cache)
