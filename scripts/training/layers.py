"""Differentiable pieces that all families share, written to be quick on one CPU core.

Shapes: B samples, L tokens, N = B·L, H heads, D head dim, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 512  # up to this length the whole score matrix fits in the cache and the custom attention wins


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms over the last axis, which is kept with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.rsqrt(norm * norm / x.shape[-1] + eps).to(x.dtype)


def _rms_backward(grad: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    grad = grad * weight
    mean = (grad * normed).sum(-1, keepdim=True) / normed.shape[-1]
    return (grad - normed * mean) * rstd


class _RMSNorm(torch.autograd.Function):
    """x / rms(x) · weight over the last axis; the built-in one runs several slow passes on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rstd = inverse_rms(x, eps)
        normed = x * rstd
        ctx.save_for_backward(normed, rstd, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, rstd, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        return _rms_backward(grad, normed, rstd, weight), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: (..., d), weight: (d,) -> (..., d)."""
    return _RMSNorm.apply(x, weight.to(x.dtype), eps)


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


class _NormRotate(torch.autograd.Function):
    """Query/key norm followed by RoPE. x: (N, 2, H, D); gain: (2, 1, D); cos, sin: (N, 1, 1, D)."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        rstd = inverse_rms(x, eps)
        normed = x * rstd
        ctx.save_for_backward(normed, rstd, gain, cos, sin)
        scaled = normed * gain
        return scaled * cos + _swap_halves(scaled) * sin

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        normed, rstd, gain, cos, sin = ctx.saved_tensors
        grad = grad * cos + _swap_halves(grad * sin)
        grad_gain = (grad * normed).sum(dim=(0, 2)).unsqueeze(1)
        return _rms_backward(grad, normed, rstd, gain), grad_gain, None, None, None


def norm_rotate(x: Tensor, gain: Tensor, rotation: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Normalise queries and keys per head and rotate them. x: (N, 2, H, D) -> the same shape."""
    return _NormRotate.apply(x, gain.to(x.dtype), *rotation, eps)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE alone. x: (N, 2, H, D) -> the same shape."""
    cos, sin = rotation
    return x * cos + _swap_halves(x) * sin


def rotation(positions: Tensor, dim: int, theta: float, dtype: torch.dtype, rotary: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin (N, 1, 1, D) of all positions; with `rotary` only that many of the D coordinates turn.

    Pair i is the coordinates i and i + D/2. The first `rotary`/2 pairs turn, the others stay.
    """
    rotary = rotary or dim
    exponents = torch.arange(0, rotary, 2, device=positions.device, dtype=torch.float32) / rotary
    angles = positions.flatten().float()[:, None] / theta**exponents
    angles = F.pad(angles, (0, dim // 2 - rotary // 2))
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos.to(dtype)[:, None, None], sin.to(dtype)[:, None, None]


class _ShortAttention(torch.autograd.Function):
    """Causal softmax attention with saved probabilities; half the time of the built-in one on a CPU."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        scores = q @ k.transpose(1, 2)
        scores += torch.full((length, length), -1e9, dtype=q.dtype, device=q.device).triu_(1)
        p = torch.softmax(scores, dim=-1)
        ctx.save_for_backward(q, k, v, p)
        return p @ v

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, p = ctx.saved_tensors
        ds = torch.ops.aten._softmax_backward_data(grad @ v.transpose(1, 2), p, -1, p.dtype)
        return ds @ k, ds.transpose(1, 2) @ q, p.transpose(1, 2) @ grad


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of scaled queries. q, k, v: (B, H, L, D) -> (B, H, L, D)."""
    if q.device.type == "cpu" and q.shape[2] <= SHORT:
        return _ShortAttention.apply(*(t.flatten(0, 1) for t in (q, k, v))).view_as(v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)


def split_heads(tensors: Sequence[Tensor], shape: tuple[int, int]) -> list[Tensor]:
    """(N, H, D) -> (B, H, L, D), each."""
    return [t.reshape(*shape, *t.shape[-2:]).transpose(1, 2) for t in tensors]


def join_heads(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (N, H·D)."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up for x = [gate | up]: (N, 2·ff) -> (N, ff)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        active = F.silu(gate)
        ctx.save_for_backward(gate, up, active)
        return active * up

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        gate, up, active = ctx.saved_tensors
        out = torch.empty(*gate.shape[:-1], 2 * gate.shape[-1], dtype=grad.dtype, device=grad.device)
        left, right = out.chunk(2, dim=-1)
        left.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        right.copy_(grad * active)
        return out


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up for x = [gate | up]: (N, 2·ff) -> (N, ff)."""
    return _SwiGLU.apply(x)
