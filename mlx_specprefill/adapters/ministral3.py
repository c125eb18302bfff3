"""Ministral 3 and Mistral 4 scale every query by a function of its absolute position.

mlx-lm derives those positions as offset + 0..L-1. Where each token has a position of its own, that is used instead.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import ministral3, mistral4

__all__ = ["install"]

_stock_scale = ministral3._get_llama_4_attn_scale


def _attn_scale(size: int, offset: Any, beta: float, max_position_embeddings: int) -> mx.array:
    """Offset as in mlx-lm, or positions (1, L) int32; the scale of each token, (1, 1, L, 1) for positions."""
    if not (isinstance(offset, mx.array) and offset.ndim == 2):
        stock: mx.array = _stock_scale(size, offset, beta, max_position_embeddings)
        return stock
    scaling = 1 + beta * mx.log(1 + mx.floor(offset / max_position_embeddings))
    return scaling[:, None, :, None]


def install() -> None:
    """Let both models take positions; ordinary offsets go through mlx-lm's own code."""
    ministral3._get_llama_4_attn_scale = _attn_scale
    mistral4._get_llama_4_attn_scale = _attn_scale
