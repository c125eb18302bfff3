"""Causal convolution and two linear recurrences in chunked form: matrix products inside a chunk, a loop over chunks.

Shapes: B samples, L tokens, H heads, K key dim (state size), V value dim, C tokens per chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution over the last W tokens. x: (B, L, c), weight: (c, W), last column for the token itself."""
    return _CausalConv.apply(x, weight.to(x.dtype))


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x * weight[:, -1]
        for lag in range(1, weight.shape[1]):
            out[:, lag:].addcmul_(x[:, :-lag], weight[:, -1 - lag])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad_x = grad * weight[:, -1]
        grad_weight = [(grad * x).sum(dim=(0, 1))]
        for lag in range(1, weight.shape[1]):
            grad_x[:, :-lag].addcmul_(grad[:, lag:], weight[:, -1 - lag])
            grad_weight.append((grad[:, lag:] * x[:, :-lag]).sum(dim=(0, 1)))
        return grad_x, torch.stack(grad_weight[::-1], dim=1)


def _chunks(x: Tensor, size: int) -> Tensor:
    """(B, H, L, ...) -> (B, H, L/C, C, ...), zeros appended."""
    padding = -x.shape[2] % size
    if padding:
        x = torch.cat((x, x.new_zeros(*x.shape[:2], padding, *x.shape[3:])), dim=2)
    return x.unflatten(2, (-1, size))


def _decay_between(total: Tensor) -> Tensor:
    """exp(total_t - total_i) for i <= t, 0 elsewhere. total: (..., C) -> (..., C, C)."""
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total.device).triu_(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule (Yang et al. 2024, section 3.3) with the UT transform inside chunks.

    S_t = g_t S_{t-1} + beta_t (v_t - g_t S_{t-1} k_t) k_t^T, y_t = S_t q_t.

    Args:
        q, k: (B, H, L, K).
        v: (B, H, L, V).
        log_decay, beta: (B, H, L); log_decay = log g <= 0.

    Returns:
        y: (B, H, L, V).
    """
    length = q.shape[2]
    q, k, v, log_decay, beta = (_chunks(t, CHUNK) for t in (q, k, v, log_decay, beta))
    total = log_decay.cumsum(-1)
    between = _decay_between(total)
    since_start = total.exp()[..., None]
    until_end = (total[..., -1:] - total).exp()[..., None]
    # What each token writes: U = (I + A)^-1 (beta v - beta e^total k S), A strictly lower.
    a = beta[..., None] * between.tril(-1) * (k @ k.mT)
    right = beta[..., None] * torch.cat((v, since_start * k), dim=-1)
    written = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True)  # reads below the diagonal only
    new_values, seen_keys = written.split((v.shape[-1], k.shape[-1]), dim=-1)
    within = between * (q @ k.mT)
    q, k, last = q * since_start, (k * until_end).mT, since_start[..., -1:, :]
    state = v.new_zeros(*v.shape[:2], k.shape[-2], v.shape[-1])
    outputs = []
    for c in range(v.shape[2]):
        u = new_values[:, :, c] - seen_keys[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + within[:, :, c] @ u)
        state = last[:, :, c] * state + k[:, :, c] @ u
    return torch.cat(outputs, dim=2)[:, :, :length]


def state_space(x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor) -> Tensor:
    """Mamba-2's scan (Dao and Gu 2024, section 6): S_t = g_t S_{t-1} + b_t x_t^T, y_t = c_t S_t.

    Args:
        x: (B, H, L, V), already multiplied by the time step.
        b, c: (B, G, L, K), each shared by H/G heads.
        log_decay: (B, H, L); log g <= 0.

    Returns:
        y: (B, H, L, V).
    """
    length, repeats = x.shape[2], x.shape[1] // b.shape[1]
    x, b, c, log_decay = (_chunks(t, CHUNK) for t in (x, b, c, log_decay))
    total = log_decay.cumsum(-1)
    within = _decay_between(total) * (c @ b.mT).repeat_interleave(repeats, dim=1)
    y = within @ x
    b, c = (t.repeat_interleave(repeats, dim=1) for t in (b, c))
    b = (b * (total[..., -1:] - total).exp()[..., None]).mT
    c = c * total.exp()[..., None]
    last = total[..., -1].exp()[..., None, None]
    added = b @ x
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for n in range(x.shape[2]):
        states.append(state)
        state = last[:, :, n] * state + added[:, :, n]
    y = y + c @ torch.stack(states, dim=2)
    return y.flatten(2, 3)[:, :, :length]


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) in float32."""
    return F.softplus(x.float())
