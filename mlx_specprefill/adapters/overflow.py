"""Checks that a model's hidden values fit into float16, which ends at 65 504.

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

from .depth import Observed, layers_of, replacing
from .probe import TOKENS

__all__ = ["FLOAT16_MAX", "largest_hidden"]

FLOAT16_MAX = 65504.0


def largest_hidden(model: nn.Module) -> float:
    """Return the largest magnitude that a layer returns in one forward; infinity if one overflows.

    Layers that are called part by part are only checked for overflows.
    """
    returned: list[Any] = []
    watched = replacing(model, {id(layer): Observed(layer, returned) for layer in layers_of(model)})
    logits = watched(mx.array([TOKENS]), cache=make_prompt_cache(model))
    found = [mx.abs(each[0] if isinstance(each, tuple) else each).max() for each in returned]
    found.append(mx.where(mx.isnan(logits).any(), mx.inf, 0.0))
    largest = float(np.array(mx.stack(found).max().astype(mx.float32)))
    return largest if math.isfinite(largest) else math.inf
