"""Work that is cut into steps, run without pauses; prompts and recalls as the engine feeds them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_specprefill.cache.feeding import feed, forward_ends
from mlx_specprefill.cache.positioned import recalling
from mlx_specprefill.cache.prefix.tree import finish

__all__ = ["finish", "prefill", "recall"]

Indices = npt.NDArray[np.int32]


def prefill(
    model: Callable[..., mx.array],
    cache: list[Any],
    prompt: Sequence[int] | Indices,
    kept: Indices | None,
    step: int,
    offset: int = 0,
    cuts: Sequence[int] = (),
) -> Generator[int, None, mx.array]:
    """Feed a prompt or its kept tokens, `offset` tokens behind the start; return the last logits (1, V).

    Yields the count of fed tokens between forwards.
    """
    ids = np.asarray(prompt, dtype=np.int32)
    tokens, positions = (ids, None) if kept is None else (ids[kept], kept + np.int32(offset))
    logits = None
    ends = forward_ends(tokens.size, lambda: step, cuts)
    for fed, logits in feed(model, cache, tokens, positions, ends, logits=True):  # noqa: B007
        yield fed
    assert logits is not None
    return logits


def recall(
    model: Callable[..., mx.array], cache: list[Any], prompt: Sequence[int], dropped: Indices, step: Callable[[], int]
) -> None:
    """Feed dropped tokens behind what the cache holds."""
    with recalling(cache):
        ids = np.asarray(prompt, dtype=np.int32)[dropped]
        for _ in feed(model, cache, ids, dropped, forward_ends(dropped.size, step, tail=0)):
            pass
