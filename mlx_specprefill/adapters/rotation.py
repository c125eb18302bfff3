"""Rotates queries and keys by given positions, through the model's own RoPE. The cache holds these positions.

Every RoPE in mlx-lm ends in `mx.fast.rope`, whatever module or function builds its frequencies. So one wrapper around
that primitive (`adapters/patches`) maps positions for all of them, without re-implementing a rotation. Calls with
ordinary offsets pass through unchanged.

- An offset that is a matrix (B, L) is one position per token. Such offsets come only from a positioned cache that knows
  the positions of its next tokens (`cache/positioned.py`).
- Inside `adjust_offsets` a shift is added to each row's offset. It serves caches that can't carry the shift themselves,
  because their `offset` is also their storage index (mlx-lm's `QuantizedKVCache`).

Two models need more. mlx-lm computes the base of a dynamic NTK RoPE from the end of the sequence,
`max(L + offset, limit)`, which needs one integer: with one position per token, the end is the position after the last
one. Ministral 3 and Mistral 4 scale every query by a function of its position, which mlx-lm derives as offset + 0..L-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import mlx.core as mx
import numpy as np

from .scoped import Active

_shifts: Active[mx.array | int] = Active()
_calls: Active[list[RotationCall]] = Active()


@dataclass(frozen=True, eq=False)
class RotationCall:
    """A call of `mx.fast.rope`, to be repeated at other positions.

    Attributes:
        output: its result.
        settings: its keyword arguments but `offset`.
    """

    output: mx.array
    dims: int
    settings: Mapping[str, Any]

    def rotate(self, x: mx.array, positions: mx.array | int) -> mx.array:
        """Rotate x (B, H, L, D) as the call did, at positions (1, L) int32, or at those from a first one on."""
        return mx.fast.rope(x, self.dims, **self.settings, offset=positions)


def wrap_dynamic_ntk(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `DynamicNTKScalingRoPE.__call__` to take positions. Integer offsets go through mlx-lm's own code."""

    @wraps(stock)
    def rotate(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
        """Rotate x (B, H, L, D). offset: as in mlx-lm, one per row (B,), or positions (1, L) int32."""
        shift = _shifts.value
        if isinstance(shift, mx.array) or shift:  # the base depends on the position, too
            with _shifts.during(0):
                return rotate(self, x, offset + shift)
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


def wrap_attention_scale(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `_get_llama_4_attn_scale` to take positions. Ordinary offsets go through mlx-lm's own code."""

    @wraps(stock)
    def scale(size: int, offset: Any, beta: float, max_position_embeddings: int) -> mx.array:
        """Return each token's scale, (1, 1, L, 1) for positions. offset: as in mlx-lm, or positions (1, L) int32."""
        offset = offset if _shifts.value is None else offset + _shifts.value
        if not (isinstance(offset, mx.array) and offset.ndim == 2):
            return stock(size, offset, beta, max_position_embeddings)
        scaling = 1 + beta * mx.log(1 + mx.floor(offset / max_position_embeddings))
        return scaling[:, None, :, None]

    return scale


class PositionMappedRoPE:
    """Wraps `mx.fast.rope` to take one absolute position per token (SpecPrefill, section 3.2.4), and shifts.

    The kernel takes one offset per batch row. So tokens are folded into the batch axis, each as a sequence of length
    one with its own offset. The arithmetic is the kernel's: results are bit-identical to rotating the dense sequence
    and taking the same rows.
    """

    def __init__(self, rope: Callable[..., mx.array]) -> None:
        self.rope = rope

    def __call__(self, x: mx.array, dims: int, *args: Any, offset: Any = 0, **kwargs: Any) -> mx.array:
        """Rotate x (B, ..., L, D). `offset`: int, (), (B,) as in `mx.fast.rope`, or positions (B | 1, L) int32.

        Raises:
            ValueError: fewer positions than tokens.
        """
        rotated = self._rotate(x, dims, *args, offset=offset, **kwargs)
        if _calls.value is not None:
            _calls.value.append(RotationCall(rotated, dims, kwargs))
        return rotated

    def _rotate(self, x: mx.array, dims: int, *args: Any, offset: Any, **kwargs: Any) -> mx.array:
        if _shifts.value is not None:
            offset = offset + _shifts.value
        if not (isinstance(offset, mx.array) and offset.ndim == 2):
            return self.rope(x, dims, *args, offset=offset, **kwargs)
        B, L = x.shape[0], x.shape[-2]
        if offset.shape[1] != L:
            raise ValueError(f"{offset.shape[1]} positions for {L} tokens")
        if B == 1:  # (1, ..., L, D) -> (L, ..., 1, D) is a view of the models' layout
            return self.rope(x.swapaxes(0, -2), dims, *args, offset=offset[0], **kwargs).swapaxes(0, -2)
        positions = mx.broadcast_to(offset, (B, L)).reshape(-1)
        rows = mx.moveaxis(x, -2, 1)  # (B, L, ..., D)
        folded = mx.expand_dims(rows.reshape(B * L, *rows.shape[2:]), -2)
        rotated = self.rope(folded, dims, *args, offset=positions, **kwargs).squeeze(-2)
        return mx.moveaxis(rotated.reshape(rows.shape), 1, -2)


@contextmanager
def record_rotations() -> Iterator[list[RotationCall]]:
    """Inside the block, record each rotation on this thread, in order."""
    with _calls.during([]) as calls:
        yield calls


@contextmanager
def adjust_offsets(shifts: Sequence[int]) -> Iterator[None]:
    """Inside the block, move row b of every rotation on this thread by `shifts[b]` positions.

    For rows whose cache can't carry the shift. All-zero shifts cost nothing.

    Raises:
        RuntimeError: `mx.fast.rope` is not wrapped, so that a shift would have no effect.
    """
    if not any(shifts):
        yield
        return
    if not isinstance(mx.fast.rope, PositionMappedRoPE):
        raise RuntimeError("mx.fast.rope is not wrapped, or was replaced afterwards")
    with _shifts.during(shifts[0] if len(shifts) == 1 else mx.array(list(shifts), dtype=mx.int32)):
        yield
