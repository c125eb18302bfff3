"""Brings the arrays of a file into memory a piece at a time, so that the progress can be told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, groupby

import mlx.core as mx

_PIECE = 128 << 20  # bytes


def bring_into_memory(arrays: Iterable[mx.array], on_progress: Callable[[int, int], None]) -> None:
    """Evaluate arrays in their order.

    Args:
        on_progress: called with the bytes that are in memory, and with those of all arrays.
    """
    arrays = list(arrays)
    ends = list(accumulate(int(array.nbytes) for array in arrays))
    for _, group in groupby(zip(arrays, ends, strict=True), key=lambda pair: pair[1] // _PIECE):
        piece = list(group)
        mx.eval([array for array, _ in piece])
        on_progress(piece[-1][1], ends[-1])
