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
from ..request import Progress
from ..token_ids import TokenIds
from .sparse_prefill import prefill

__all__ = ["HiddenStates", "Reading", "prefill_upper"]


class HiddenStates:
    """What the first layers pass on, of a prompt's tokens from index `first` on."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._parts: list[mx.array] = []

    def keep(self, start: int, hidden: mx.array) -> None:
        """Hidden states (1, L, D) of the tokens from index `start` on, in the order in which they are read."""
        new = hidden[:, max(0, self.first - start) :]
        if new.shape[1]:
            mx.eval(new)
            self._parts.append(new)

    def of(self, kept: npt.NDArray[np.int32]) -> mx.array:
        """Those of the prompt's indices `kept` (N,), ascending, none below `first`: (1, N, D)."""
        starts = np.cumsum([0, *(part.shape[1] for part in self._parts)])
        index = kept - self.first
        within = np.searchsorted(starts, index, side="right") - 1
        chosen = [
            part[:, mx.array(index[within == number] - starts[number])]
            for number, part in enumerate(self._parts)
            if (within == number).any()
        ]
        return mx.concatenate(chosen, axis=1) if chosen else self._parts[0][:, :0]

    def put_before(self, other: HiddenStates) -> None:
        """Those of the tokens from `other.first` on, which end where these begin."""
        self.first, self._parts = other.first, other._parts + self._parts

    def clear(self) -> None:
        self._parts.clear()

    @property
    def nbytes(self) -> int:
        return sum(int(part.nbytes) for part in self._parts)


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
