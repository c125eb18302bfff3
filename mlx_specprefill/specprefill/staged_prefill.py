"""Prefills a target in two parts: its first layers read the whole prompt, the others the kept tokens.

The first layers' work is reused: a scorer reads the prompt with them and keeps the hidden states. After the selection
the other layers continue from there.
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

__all__ = ["HiddenStates", "UpperLayersModel", "prefill_upper"]

_Part = tuple[int, mx.array]  # index of the first token, hidden states (1, L, D)


class HiddenStates:
    """Hidden states that the first layers return for a prompt.

    Attributes:
        first: index below which no states are kept: the other layers have read these tokens.
        known: index below which the draft need not read again for them.
    """

    def __init__(self, first: int = 0, known: int | None = None, parts: Sequence[_Part] = ()) -> None:
        """Args:
        parts: of an earlier turn.
        """
        self.first = first
        self.known = first if known is None else known
        self._parts = list(parts)
        self._begun = False

    @property
    def end(self) -> int:
        """Return the index after the last state."""
        return max((start + states.shape[1] for start, states in self._parts), default=self.first)

    def keep(self, start: int, hidden: mx.array) -> None:
        """Keep the hidden states (1, L, D) of the tokens from index `start` on. Call in reading order."""
        skipped = max(0, self.first - start)
        new = hidden[:, skipped:]
        if new.shape[1]:
            mx.eval(new)
            if not self._begun:
                self._parts = _below(start + skipped, self._parts)
            self._begun = True
            self._parts.append((start + skipped, new))

    def covers(self, indices: npt.NDArray[np.int32]) -> bool:
        """Return whether the states of all these prompt indices are stored."""
        return sum(int(_within(part, indices).sum()) for part in self._parts) == indices.size

    def of(self, indices: npt.NDArray[np.int32]) -> mx.array:
        """Return the states (1, N, D) of the prompt's ascending indices (N,).

        Raises:
            ValueError: some are missing.
        """
        if not self.covers(indices):
            raise ValueError("hidden states of some tokens were not kept")
        found = [(part, indices[_within(part, indices)]) for part in self._parts]
        chosen = [states[:, mx.array(some - start)] for (start, states), some in found if some.size]
        return mx.concatenate(chosen, axis=1) if chosen else self._parts[0][1][:, :0]

    def between(self, start: int, end: int) -> tuple[int, mx.array] | None:
        """Return the stored states of [start, end), with the index of the first; None if there are none."""
        inside = [part for part in _below(end, self._parts) if part[0] + part[1].shape[1] > start]
        if not inside:
            return None
        first = max(start, inside[0][0])
        states = [states[:, max(0, first - begin) :] for begin, states in inside]
        return first, mx.contiguous(mx.concatenate(states, axis=1))

    def clear(self) -> None:
        self._parts.clear()

    @property
    def nbytes(self) -> int:
        return sum(int(states.nbytes) for _, states in self._parts)


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
    """Prefill the kept tokens in the layers behind the first ones, as `prefill`.

    Args:
        cache: positioned, of those layers only.
        hidden: the first layers' hidden states of the kept tokens, (1, N, D).
    """
    return prefill(UpperLayersModel(model.upper, hidden), cache, prompt, kept, step, offset)


class UpperLayersModel:
    """The upper layers as a model of tokens with known hidden states (1, N, D), in feeding order."""

    def __init__(self, upper: UpperLayers, hidden: mx.array) -> None:
        self._upper = upper
        self._hidden = hidden
        self._read = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        start, self._read = self._read, self._read + inputs.shape[1]
        return self._upper(inputs, self._hidden[:, start : self._read], cache)
