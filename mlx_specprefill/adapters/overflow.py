"""Check that a model's hidden values fit into float16, which ends at 65 504.

Models are trained in bfloat16, whose range is that of float32. In float16 hidden values that are too large become
infinite, and every answer nonsense.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from .depth import layers_of, replacing
from .probe import TOKENS

__all__ = ["FLOAT16_MAX", "largest_hidden"]

FLOAT16_MAX = 65504.0


def largest_hidden(model: nn.Module) -> float:
    """Return the largest magnitude that a layer returns in one forward; infinity where one overflows.

    Layers that are not called themselves, but part by part, are only checked for overflows.
    """
    found: list[mx.array] = []
    watched = replacing(model, {id(layer): _Watched(layer, found) for layer in layers_of(model)})
    logits = watched(mx.array([TOKENS]), cache=make_prompt_cache(model))
    found.append(mx.where(mx.isnan(logits).any(), mx.inf, 0.0))
    largest = float(np.array(mx.stack(found).max().astype(mx.float32)))
    return largest if math.isfinite(largest) else math.inf


class _Watched(nn.Module):  # type: ignore[misc]
    """Takes the place of a layer: has its attributes, runs it, and notes the largest magnitude that it returns."""

    def __init__(self, layer: nn.Module, found: list[mx.array]) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_found", found)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._layer(*args, **kwargs)
        hidden = returned[0] if isinstance(returned, tuple) else returned
        self._found.append(mx.abs(hidden).max())
        return returned
