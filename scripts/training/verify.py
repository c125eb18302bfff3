"""Check the networks' arithmetic: torch against mlx-lm.

Needs mlx-lm beside torch. `train_demo_models.py verify` runs it, and `export` on what it wrote.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import load

from .network import Network
from .stages import RunConfig

TOLERANCE = 1e-4


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
