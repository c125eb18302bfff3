"""Attention of several rows in one forward: each reads its own keys and values, of its own length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache.merging import RowTokens

Attention = Callable[..., mx.array]


def wrap_rows(attention: Attention) -> Attention:
    """Wrap `mx.fast.scaled_dot_product_attention` to attend row by row where a batch stores rows one by one."""

    def attend(q: mx.array, k: Any, v: Any, *, scale: float, mask: Any = None, sinks: Any = None) -> mx.array:
        if not isinstance(k, RowTokens):
            return attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
        count = len(k.rows)
        masks = mask.rows if isinstance(mask, RowTokens) else [mask] * count
        rows = zip(mx.split(q, count), k.rows, v.rows, k.caches, masks, strict=True)
        # mlx-lm's function reads quantised rows, too.
        outputs = [scaled_dot_product_attention(*row, scale=scale, mask=seen, sinks=sinks) for *row, seen in rows]
        return mx.concatenate(outputs)

    return attend
