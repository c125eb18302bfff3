"""Ministral 3 and Mistral 4 scale every query by a function of its absolute position.

mlx-lm derives the positions as offset + 0..L-1. If tokens have explicit positions, those are used instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

__all__ = ["wrap_attention_scale"]


def wrap_attention_scale(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `_get_llama_4_attn_scale` to take positions. Ordinary offsets go through mlx-lm's own code."""

    @wraps(stock)
    def scale(size: int, offset: Any, beta: float, max_position_embeddings: int) -> mx.array:
        """Return each token's scale, (1, 1, L, 1) for positions. offset: as in mlx-lm, or positions (1, L) int32."""
        if not (isinstance(offset, mx.array) and offset.ndim == 2):
            return stock(size, offset, beta, max_position_embeddings)
        scaling = 1 + beta * mx.log(1 + mx.floor(offset / max_position_embeddings))
        return scaling[:, None, :, None]

    return scale
