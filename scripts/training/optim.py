"""Muon for the hidden matrices, AdamW for embeddings, norms and gains."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from .network import Network

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Replace each (m, n) matrix of a (..., m, n) stack by about the nearest semi-orthogonal one."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(Optimizer):
    """Momentum whose update is orthogonalised; every parameter is a matrix or a stack of matrices."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update (Nesterov momentum)."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)


def build(model: Network, muon_lr: float, adam_lr: float) -> list[Optimizer]:
    """The two optimisers of a model; each group remembers its base rate for the schedule."""
    matrices = model.matrices()
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    optimisers = [Muon(matrices, muon_lr), torch.optim.AdamW(others, adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["base_lr"] = group["lr"]
    return optimisers


def set_rate(optimisers: list[Optimizer], factor: float) -> None:
    """Scale every learning rate to `factor` times its base."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * factor
