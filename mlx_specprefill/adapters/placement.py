"""On which of several ranks the draft is."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..distributed.ranks import Group
from ..errors import LoadError
from .depth import layers_of
from .sharding import check_heads, sharding_of

__all__ = ["DraftPlacement", "PlacementChoice", "fits_beside", "place_draft", "predicted_s"]

log = logging.getLogger(__name__)

DraftPlacement = Literal["all", "first", "sharded"]
"""On every rank, on rank 0 alone, which sends the others the importance, or a part of every layer on each rank."""
PlacementChoice = Literal["auto", "all", "first", "sharded"]

_TOKENS = 512  # of the forward by which placements are compared
_COLLECTIVES = 2  # per layer: behind attention and behind the feed-forward part
_TRIES = 3


def place_draft(draft: nn.Module | None, config: dict[str, Any] | None, ranks: Group) -> DraftPlacement:
    """The faster one of "first" and "sharded", by a forward on rank 0 and by collectives of that forward's size.

    "all" is never faster than "first": the slowest rank is waited for, and rank 0's importance is sent either way.

    Args:
        draft, config: rank 0's; None on the others, and where it can't be sharded.
    """
    shape = ranks.agree("draft's shape", lambda: None if draft is None else _shape(draft, config or {}, ranks.size))
    if shape is None:
        return "first"
    layers, hidden, dtype = shape
    collective_s = _collective_s(hidden, getattr(mx, dtype), ranks)
    forward_s = _forward_s(draft) if draft is not None else 0.0

    def decide() -> DraftPlacement:
        sharded_s = predicted_s(forward_s, collective_s, layers, ranks.size)
        log.info(
            "%d tokens of the draft: measured %.1f ms on rank 0, predicted %.1f ms on %d ranks, %.2f ms of it per sum",
            *(_TOKENS, 1e3 * forward_s, 1e3 * sharded_s, ranks.size, 1e3 * collective_s),
        )
        return "sharded" if sharded_s < forward_s else "first"

    return ranks.agree("draft placement", decide)


def predicted_s(forward_s: float, collective_s: float, layers: int, size: int) -> float:
    """A forward of a sharded draft. That computing takes a part in `size` is an estimate, the sums are measured."""
    return forward_s / size + _COLLECTIVES * layers * collective_s


def fits_beside(target: nn.Module, files: Path | None, limit: int | None) -> bool:
    """Whether the weights in a folder have room beside this rank's part of the target, as far as is known.

    Args:
        limit: bytes for both.
    """
    if files is None or limit is None:
        return True
    stored = sum(file.stat().st_size for file in files.glob("*.safetensors"))
    return stored + sum(int(array.nbytes) for _, array in tree_flatten(target.parameters())) <= limit


def _shape(draft: nn.Module, config: dict[str, Any], size: int) -> tuple[int, int, str] | None:
    """Layers, width and dtype; None where it can't be sharded."""
    text = config.get("text_config", config)
    try:
        check_heads("the draft", config, size)
    except LoadError:
        return None
    if sharding_of(draft) != "tensor" or "hidden_size" not in text:
        return None
    floats = (array.dtype for _, array in tree_flatten(draft.parameters()) if mx.issubdtype(array.dtype, mx.floating))
    return len(layers_of(draft)), int(text["hidden_size"]), str(next(floats, mx.float32)).rpartition(".")[2]


def _forward_s(draft: nn.Module) -> float:
    """The fastest of some, in seconds."""
    found = []
    for _ in range(_TRIES):
        cache = make_prompt_cache(draft)
        begun = time.perf_counter()
        draft(mx.zeros((1, _TOKENS), dtype=mx.int32), cache=cache)
        mx.eval([part.state for part in cache])
        found.append(time.perf_counter() - begun)
    return min(found)


def _collective_s(hidden: int, dtype: mx.Dtype, ranks: Group) -> float:
    """The fastest of some, in seconds, on this rank."""
    found = []
    for _ in range(_TRIES):
        values = mx.ones((1, _TOKENS, hidden), dtype=dtype)
        mx.eval(values)
        ranks.range(0)  # all of them begin now
        begun = time.perf_counter()
        mx.eval(mx.distributed.all_sum(values, group=ranks.group))
        found.append(time.perf_counter() - begun)
    return min(found)
