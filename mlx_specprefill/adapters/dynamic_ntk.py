"""Dynamic NTK RoPE at original positions.

mlx-lm computes its base from the end of the sequence, `max(L + offset, limit)`, which needs one integer. With one
position per token the end of the sequence is the position after the last of them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

__all__ = ["install"]

_stock_call = DynamicNTKScalingRoPE.__call__


def _call(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
    """x (B, H, L, D); offset as in mlx-lm, one per row (B,), or positions (1, L) int32."""
    if isinstance(offset, mx.array) and offset.ndim == 1:  # every row has a base of its own
        rows = [_stock_call(self, x[row : row + 1], start) for row, start in enumerate(np.array(offset).tolist())]
        return mx.concatenate(rows)
    if not (isinstance(offset, mx.array) and offset.ndim == 2):
        stock: mx.array = _stock_call(self, x, offset)
        return stock
    seq_len = max(int(np.array(offset).max()) + 1, self.max_position_embeddings)
    growth = self.factor * seq_len / self.max_position_embeddings - (self.factor - 1)
    base = self.base * growth ** (self.dims / (self.dims - 2))
    rotated: mx.array = mx.fast.rope(x, self.dims, traditional=self.traditional, base=base, scale=1.0, offset=offset)
    return rotated


def install() -> None:
    """Let every dynamic NTK module take positions; integer offsets go through mlx-lm's own code."""
    DynamicNTKScalingRoPE.__call__ = _call
