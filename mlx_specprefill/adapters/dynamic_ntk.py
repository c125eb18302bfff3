"""Dynamic NTK RoPE at original positions.

mlx-lm computes its base from the end of the sequence, `max(L + offset, limit)`, which needs one integer. With one
position per token, the end is the position after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import numpy as np

__all__ = ["wrap_dynamic_ntk"]


def wrap_dynamic_ntk(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `DynamicNTKScalingRoPE.__call__` to take positions. Integer offsets go through mlx-lm's own code."""

    @wraps(stock)
    def rotate(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate x (B, H, L, D). offset: as in mlx-lm, one per row (B,), or positions (1, L) int32."""
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return stock(self, x, offset)
        if offset.ndim == 1:  # every row has its own base
            starts = np.array(offset).tolist()
            return mx.concatenate([stock(self, x[row : row + 1], start) for row, start in enumerate(starts)])
        seq_len = max(int(np.array(offset).max()) + 1, self.max_position_embeddings)
        growth = self.factor * seq_len / self.max_position_embeddings - (self.factor - 1)
        base = self.base * growth ** (self.dims / (self.dims - 2))
        return mx.fast.rope(x, self.dims, traditional=self.traditional, base=base, scale=1.0, offset=offset)

    return rotate
