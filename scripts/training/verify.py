"""Check the networks' arithmetic: chunked recurrences against their definitions, torch against mlx-lm.

Needs mlx-lm beside torch. `train_demo_models.py verify` runs it; `export` runs the second part on what it wrote.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import load
from torch import Tensor

from . import recurrence
from .network import Network
from .stages import RunConfig

TOLERANCE = 1e-4


def recurrences(length: int = 150) -> float:
    """Return the largest difference, values and gradients, between the chunked and the stepwise forms (double
    precision).
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (draw(2, 4, length, 8) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay, beta = -draw(2, 4, length).exp(), torch.sigmoid(draw(2, 4, length))
    b, c = draw(2, 2, length, 8), draw(2, 2, length, 8)
    return max(
        _difference(recurrence.gated_delta, recurrence.gated_delta_stepwise, q, k, v, decay, beta),
        _difference(recurrence.state_space, recurrence.state_space_stepwise, v, b, c, decay),
    )


def _difference(fast, exact, *inputs: Tensor) -> float:
    results = []
    for function in (fast, exact):
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def parity(model: Network, folder: Path, length: int = 300) -> float:
    """Return the largest difference between the logits of `model` and of mlx-lm's model from `folder`, both in float32.

    As a share of the largest logit.
    """
    tokens = torch.randint(3, model.sizes.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model.hidden(tokens, torch.arange(length)[None], torch.float32)
        expected = model.logits(hidden).numpy()
    other, _ = load(str(folder))
    other.set_dtype(mx.float32)
    logits = np.array(other(mx.array(tokens.numpy()))[0])
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def disturbed(model: Network, run: RunConfig) -> Network:
    """Return `model` at its start with noise on every parameter, so that none is zero or one by construction."""
    run.family.initialise(model, run.start, run.seed)
    generator = torch.Generator().manual_seed(run.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model


def rounded(model: Network) -> Network:
    """Return `model` with its parameters rounded to those of a float16 checkpoint."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


def close(difference: float) -> bool:
    """Return whether a difference is rounding."""
    return math.isfinite(difference) and difference < TOLERANCE
