"""The chunked recurrences against their definitions, token by token, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `train`")

from training import recurrence  # noqa: E402 - it imports torch

Tensor = Any
LENGTH = 150  # tokens: two whole chunks and a part


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule by its definition."""
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(q.shape[2]):
        state = state * log_decay[:, :, t, None, None].exp()
        error = v[:, :, t, None] - k[:, :, t, None] @ state
        state = state + beta[:, :, t, None, None] * k[:, :, t, :, None] * error
        outputs.append(q[:, :, t, None] @ state)
    return torch.cat(outputs, dim=2)


def state_space(x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor) -> Tensor:
    """Mamba-2's scan by its definition."""
    repeats = x.shape[1] // b.shape[1]
    b, c = (t.repeat_interleave(repeats, dim=1) for t in (b, c))
    state = x.new_zeros(*x.shape[:2], b.shape[-1], x.shape[-1])
    outputs = []
    for t in range(x.shape[2]):
        state = state * log_decay[:, :, t, None, None].exp() + b[:, :, t, :, None] * x[:, :, t, None]
        outputs.append(c[:, :, t, None] @ state)
    return torch.cat(outputs, dim=2)


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the function's values and the gradients of its inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kind", ["gated_delta", "state_space"])
def test_chunks_compute_what_single_tokens_do(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(2, 4, LENGTH, 8) for _ in range(3))
    decay, beta = -draw(2, 4, LENGTH).exp(), torch.sigmoid(draw(2, 4, LENGTH))
    inputs = [q, k / k.norm(dim=-1, keepdim=True), v, decay, beta]
    if kind == "state_space":
        inputs = [v, draw(2, 2, LENGTH, 8), draw(2, 2, LENGTH, 8), decay]
    ours, exact = (results(function, inputs) for function in (getattr(recurrence, kind), globals()[kind]))
    assert all(float((a - b).abs().max()) < 1e-4 for a, b in zip(ours, exact, strict=True))
