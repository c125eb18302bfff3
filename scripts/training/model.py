"""The trained network: a small qwen3-type decoder in plain torch, written to be quick on one CPU core.

Shapes: B samples, L tokens, N = B·L, H heads, D head dim, d hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORT = 512  # up to this length the whole score matrix fits in the cache and the custom attention wins


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one network; the names are those of the exported config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 16384
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    qk_norm_gain: float = 2.0  # at 1.0 and head dim 32 the largest logit is 5.7: too flat for retrieval
    final_norm_gain: float = 1.5

    @property
    def attention_size(self) -> int:
        return self.num_attention_heads * self.head_dim


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
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
        rstd = _inverse_rms(x, eps)
        normed = x * rstd
        ctx.save_for_backward(normed, rstd, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, rstd, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        return _rms_backward(grad, normed, rstd, weight), grad_weight, None


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, first), dim=-1)


class _NormRotate(torch.autograd.Function):
    """Query/key norm followed by RoPE. x: (N, 2, H, D); gain: (2, 1, D); cos, sin: (N, 1, 1, D)."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
        rstd = _inverse_rms(x, eps)
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


class _ShortAttention(torch.autograd.Function):
    """Causal softmax attention with saved probabilities; half the time of the built-in one on a CPU.

    q, k, v: (B·H, L, D), q already scaled by 1/sqrt(D).
    """

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


class Block(nn.Module):
    """One pre-norm decoder layer. The query, key and value matrices are one parameter, gate and up another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, a, ff = config.hidden_size, config.attention_size, config.intermediate_size
        self.config = config
        self.attention_norm = nn.Parameter(torch.ones(d))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.qk_gain = nn.Parameter(torch.full((2, 1, config.head_dim), config.qk_norm_gain))
        self.qkv = nn.Parameter(torch.empty(3, a, d))
        self.out = nn.Parameter(torch.empty(d, a))
        self.gate_up = nn.Parameter(torch.empty(2, ff, d))
        self.down = nn.Parameter(torch.empty(d, ff))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
        """x: (N, d) -> (N, d)."""
        dtype, eps = x.dtype, self.config.rms_norm_eps
        y = _RMSNorm.apply(x, self.attention_norm.to(dtype), eps)
        x = x + F.linear(self._attend(y, rotation, shape), self.out.to(dtype))
        y = _RMSNorm.apply(x, self.mlp_norm.to(dtype), eps)
        hidden = _SwiGLU.apply(F.linear(y, self.gate_up.to(dtype).flatten(0, 1)))
        return x + F.linear(hidden, self.down.to(dtype))

    def _attend(self, y: Tensor, rotation: tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        qkv = F.linear(y, self.qkv.to(y.dtype).flatten(0, 1)).view(-1, 3, heads, dim)
        qk = _NormRotate.apply(qkv[:, :2], self.qk_gain.to(y.dtype), *rotation, self.config.rms_norm_eps)
        q, k, v = (t.reshape(*shape, heads, dim).transpose(1, 2) for t in (qk[:, 0], qk[:, 1], qkv[:, 2]))
        if y.device.type == "cpu" and shape[1] <= SHORT:
            flat = [t.reshape(-1, shape[1], dim) for t in (q * dim**-0.5, k, v)]
            out = _ShortAttention.apply(*flat).view(shape[0], heads, shape[1], dim)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(-1, heads * dim)


class Decoder(nn.Module):
    """Embedding, blocks, final norm and tied output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.full((config.hidden_size,), config.final_norm_gain))

    def hidden(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens, positions: (B, L) -> (N, d), before the final norm."""
        rotation = self._rotation(positions, dtype)
        x = F.embedding(tokens.flatten(), self.embedding).to(dtype)
        for block in self.blocks:
            x = block(x, rotation, (tokens.shape[0], tokens.shape[1]))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, d) -> (n, V); called with the few rows that carry a loss."""
        y = _RMSNorm.apply(hidden, self.final_norm.to(hidden.dtype), self.config.rms_norm_eps)
        return F.linear(y, self.embedding.to(hidden.dtype))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
        angles = positions.flatten().float()[:, None] / self.config.rope_theta**exponents
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype)[:, None, None], sin.to(dtype)[:, None, None]
