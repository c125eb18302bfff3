"""Prefills the target, sparse or full, through one code path."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..cache.positioned import Positioned, leaves, place
from ..errors import SparseUnsupportedError
from ..request import Progress, TokenIds

__all__ = ["TAIL", "prefill"]

# Tokens of the last forward. One alone would cost a whole pass over the weights. A few rows add little to the output
# projection, which runs over all of them. Up to twice as many are not worth a second pass.
TAIL = 32


def prefill(
    model: nn.Module,
    cache: list[Any],
    prompt: Sequence[int] | TokenIds,
    kept: npt.NDArray[np.int32] | None,
    step: int | Callable[[], int],
    offset: int = 0,
    cuts: Sequence[int] = (),
    forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    last_forward: Callable[[mx.array, list[Any]], mx.array] | None = None,
) -> Generator[Progress, None, mx.array]:
    """Feed the prompt, or its kept tokens at their original positions. Yields between forwards.

    After a sparse prefill the cache decodes from position offset + M although it holds fewer tokens.

    Args:
        cache: positioned for a sparse prefill; any mlx-lm cache for a full one. Holds `offset` tokens already.
        prompt: M token ids that follow the cached ones.
        kept: ascending prompt indices (N,) that end in M - 1; None feeds everything.
        step: tokens per forward, or a function called before each. The last forward is short, because all of its rows
            reach the output projection.
        cuts: counts of fed tokens at which a forward must end, ascending.
        forward: a context for each forward.
        last_forward: feeds the last token (1, 1) to the cache in place of the model, and more tokens that may follow;
            returns the token's logits (1, V).

    Returns:
        Logits of the last prompt token, (1, V), in the model's dtype.

    Raises:
        SparseUnsupportedError: the cache can't hold original positions.
        ValueError: the last prompt token is not kept: its logits give the answer's first token.
    """
    if kept is not None:
        if kept.size == 0 or kept[-1] != len(prompt) - 1:
            raise ValueError("the last prompt token must be kept")
        if not any(isinstance(part, Positioned) for part in leaves(cache)):
            raise SparseUnsupportedError("no layer of the cache holds positions")
    ids = np.asarray(prompt, dtype=np.int32)
    fed = ids if kept is None else ids[kept]
    total = fed.size
    tokens = mx.array(fed)[None]
    tail = 1 if last_forward is not None else TAIL if total > 2 * TAIL else total
    start, last = 0, max([total - tail, *(cut for cut in cuts if cut < total)])
    while start < last:
        end = min(start + (step if isinstance(step, int) else step()), last)
        end = next((cut for cut in cuts if start < cut < end), end)
        if kept is not None:
            place(cache, kept[start:end] + offset)
        with forward():
            model(tokens[:, start:end], cache=cache)
        mx.eval([part.state for part in cache])
        yield Progress("prefill", end, total)
        start = end
    if kept is not None:
        place(cache, kept[start:] + offset)
    rest = tokens[:, start:]
    with forward():
        logits: mx.array = model(rest, cache=cache)[:, -1, :] if last_forward is None else last_forward(rest, cache)
    mx.eval(logits, [part.state for part in cache])
    yield Progress("prefill", total, total)
    return logits
