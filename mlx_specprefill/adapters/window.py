"""A draft reads within a window: its tokens see the first ones and those shortly before, so the time is linear.

Tokens are read in blocks of the prompt, counted from its beginning. A block's tokens see the first `sinks` tokens, the
`window` tokens in front of the block, and their own block up to themselves. The cut depends on a token's index alone,
not on the forward that reads it. The cache keeps all keys, so later tokens may see everything: those of the question.

Only attention to the whole prompt is cut, which mlx-lm asks for by the mask "causal", or by none for one token. Sliding
windows and recurrent layers stay as they are, and so do models that write attention by hand or build masks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.positioned import leaves, tokens_in
from ..config import DraftWindow
from .scoped import Active

Attention = Callable[..., mx.array]
_forward: Active[_Forward] = Active()


@dataclass(frozen=True)
class WindowedReader:
    """A model that reads within a window. Called as the model is."""

    model: nn.Module
    window: DraftWindow

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        read = tokens_in(cache)
        ring = max((int(part.max_size) for part in leaves(cache) if hasattr(part, "max_size")), default=0)
        with _forward.during(_Forward(self.window, read, read + tokens.shape[1], ring)):
            output: mx.array = self.model(tokens, cache=cache)
            return output


@dataclass(frozen=True, slots=True)
class _Forward:
    """One forward of the tokens [start, end) of a prompt.

    Attributes:
        ring: tokens of the longest sliding window. Up to there its layers ask for the mask "causal", too.
    """

    window: DraftWindow
    start: int
    end: int
    ring: int

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield [start, end) of the queries that see the same keys, and the first key behind the sinks."""
        size, whole = self.window.block, self.window.whole(self.ring)
        start = self.start
        while start < self.end:
            end = min(self.end, whole if start < whole else (start // size + 1) * size)
            first = 0 if start < whole else start // size * size - self.window.tokens
            yield start, end, first
            start = end

    def attend(self, attention: Attention, q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        whole = kwargs.get("mask") == "causal" if q.shape[2] > 1 else kwargs.get("mask") is None
        if k.shape[2] != self.end or not whole:
            return attention(q, k, v, **kwargs)
        parts = []
        for start, end, first in self.blocks():
            keys, values = (_seen(array, self.window.sinks, first, end) for array in (k, v))
            parts.append(attention(q[:, :, start - self.start : end - self.start], keys, values, **kwargs))
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]


def _seen(array: mx.array, sinks: int, first: int, end: int) -> mx.array:
    """Return the sinks' rows and those of [first, end), (B, H, L, D)."""
    if first <= sinks:
        return array[:, :, :end]
    return mx.concatenate([array[:, :, :sinks], array[:, :, first:end]], axis=2)


def wrap_window(attention: Attention) -> Attention:
    """Wrap `mx.fast.scaled_dot_product_attention` to show a block its own keys only."""

    def attend(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        forward = _forward.value
        if forward is None:
            return attention(q, k, v, **kwargs)
        return forward.attend(attention, q, k, v, **kwargs)

    return attend
