"""Chunks that an earlier turn dropped, read into its cache afterwards.

A token that is fed sees what the cache holds before it by then. Inserted ones see all that, earlier ones too; what lay
behind them stays as it was computed, without them; whatever is fed later sees both. That is what a dense run gives
whose mask hides from each token what was not there when it was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..cache.positioned import place
from ..request import Progress, TokenIds
from .splice import Splice

__all__ = ["insert"]


def insert(
    model: nn.Module,
    cache: list[Any],
    prompt: Sequence[int] | TokenIds,
    missing: npt.NDArray[np.int32],
    step: Callable[[], int],
) -> Generator[Progress, None, None]:
    """Read the prompt's tokens at `missing` into a cache that holds others before and behind them.

    Yields between forwards; the cache is whole again when it ends, and of no use if it is left earlier.

    Args:
        cache: one of which `can_splice` is true, as the prompt's first tokens with gaps left it.
        missing: ascending prompt indices (N,) that it does not hold, before its end.
        step: tokens per forward, asked before each.
    """
    tokens = np.asarray(prompt, dtype=np.int32)
    splice, done = Splice(cache, int(missing[0])), 0
    while done < missing.size:
        part = _run(missing[done : done + step()])
        splice.put_back(before=int(part[0]))
        place(cache, part)
        model(mx.array(tokens[part])[None], cache=cache)  # no output is asked for: only the cache is computed
        mx.eval([layer.state for layer in cache])
        done += int(part.size)
        yield Progress("prefill", done, int(missing.size))
    splice.put_back()


def _run(indices: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The first ones, up to a gap."""
    gaps = np.flatnonzero(np.diff(indices) != 1)
    return indices[: gaps[0] + 1] if gaps.size else indices
