"""Dropped tokens of the earlier text, read behind what a cache holds.

What a recalled token sees depends on the layer:

- Full attention: all that the cache holds by then at positions up to its own, which is the original one. Masked by a
  window: what of this lies within the window.
- Recurrent layers: everything that was fed before it, in the order of feeding.
- Sliding windows on a ring: the tokens of its own recall alone, within the window by position. The ring is set aside
  during the recall and is afterwards what it was, so that the most recent tokens stay in it.

Whatever is fed later sees recalled tokens like any others, except in rings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from ..cache.positioned import PositionedKVCache, PositionedRotatingKVCache, leaves, place
from ..request import Progress, TokenIds

__all__ = ["can_recall", "recall"]

_KINDS = (PositionedKVCache, PositionedRotatingKVCache, ArraysCache)


def can_recall(cache: Sequence[Any]) -> bool:
    """Return whether some layer keeps every token, and every layer's view of recalled tokens is known."""
    parts = list(leaves(cache))
    return all(isinstance(part, _KINDS) for part in parts) and any(
        isinstance(part, PositionedKVCache) for part in parts
    )


def recall(
    model: Callable[..., mx.array],
    cache: list[Any],
    prompt: Sequence[int] | TokenIds,
    dropped: npt.NDArray[np.int32],
    step: Callable[[], int],
) -> Generator[Progress, None, None]:
    """Read the prompt's tokens at `dropped` behind the cached ones. Yields between forwards.

    Afterwards the cache is consistent; closed early, it holds the tokens read so far.

    Args:
        model: called as `model(tokens, cache=cache)` with tokens (1, L); its result is not used.
        cache: one for which `can_recall` is true.
        dropped: ascending prompt indices (N,) before the cache's next position, none of which it holds.
        step: returns the tokens of each forward.
    """
    tokens, done = np.asarray(prompt, dtype=np.int32), 0
    with _rings_aside(cache):
        while done < dropped.size:
            part = dropped[done : done + step()]
            place(cache, part)
            model(mx.array(tokens[part])[None], cache=cache)  # the unused output is never computed
            mx.eval([layer.state for layer in cache])
            done += int(part.size)
            yield Progress("prefill", done, int(dropped.size))


@contextmanager
def _rings_aside(cache: Sequence[Any]) -> Iterator[None]:
    """Empty the rings inside the block, and restore them at its end."""
    rings = [part for part in leaves(cache) if isinstance(part, PositionedRotatingKVCache)]
    held = [ring.state for ring in rings]
    for ring in rings:
        ring.state = RotatingKVCache(ring.max_size).state, ring.next, []
    try:
        yield
    finally:
        for ring, state in zip(rings, held, strict=True):
            ring.state = state
