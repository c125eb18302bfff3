"""What a sequence costs in a model, measured on the model itself. MLX thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from ...adapters.depth import FirstLayers
from ...adapters.mtp import MTPHead
from ...adapters.staged import StagedModel
from ...cache.positioned import leaves
from .admission import Footprint, physical_memory

__all__ = [
    "cache_footprint",
    "default_limit",
    "hidden_bytes",
    "measure_footprint",
    "measure_head_footprint",
    "weight_bytes",
    "weights_by_array",
]

_PROBE = 128  # tokens of the measuring forward
_SHARE_OF_RAM = 0.8  # of physical memory, where the device recommends no working set


def default_limit() -> int | None:
    """Bytes that weights, sequences and caches may use together."""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended:
        return int(recommended)
    ram = physical_memory()
    return int(_SHARE_OF_RAM * ram) if ram else None


def weight_bytes(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Of the parameters in memory that `beside` does not have as well: a draft can be a part of its target."""
    counted = {} if beside is None else _arrays(beside)
    return sum(int(array.nbytes) for key, array in _arrays(model).items() if key not in counted)


def weights_by_array(*models: nn.Module | None) -> dict[int, int]:
    """Bytes of the parameters of all these models, each array once, by identity."""
    found = {key: array for model in models if model is not None for key, array in _arrays(model).items()}
    return {key: int(array.nbytes) for key, array in found.items()}


def _arrays(model: nn.Module) -> dict[int, mx.array]:
    """By identity; the layers that a draft doesn't run are there all the same."""
    held = [model, model.whole] if isinstance(model, FirstLayers) else [model]
    return {id(array): array for part in held for _, array in tree_flatten(part.parameters())}


def measure_footprint(model: nn.Module | None, step: int) -> Footprint:
    """Run one short prefill and read the cache's arrays and the allocator's peak.

    Activations grow linearly with the tokens of a forward; attention scores are not counted, because the fused kernels
    of GPUs never hold them (the CPU backend does, and needs more than predicted there).
    """
    if model is None:
        return Footprint(0, 0, 0)
    cache = make_prompt_cache(model)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(mx.zeros((1, _PROBE), dtype=mx.int32), cache=cache)
    mx.eval([part.state for part in cache])
    peak = mx.get_peak_memory() - before
    return Footprint(*cache_footprint(cache), max(0, peak) * step // _PROBE)


def cache_footprint(cache: list[Any]) -> tuple[int, int]:
    """Of a cache that holds some tokens: bytes per token, and whatever the length. No array is read."""
    per_token = constant = 0
    for part in leaves(cache):
        if isinstance(part, ArraysCache):
            constant += int(part.nbytes)
        elif isinstance(part, RotatingKVCache):
            constant += _bytes_per_token(part) * int(part.max_size)
        elif getattr(part, "keys", None) is not None:
            per_token += _bytes_per_token(part)
    return per_token, constant


def hidden_bytes(model: StagedModel) -> int:
    """Bytes that the first layers pass on per token; nothing is computed."""
    return int(model.lower(mx.zeros((1, 1), dtype=mx.int32), cache=model.lower.make_cache()).nbytes)


def measure_head_footprint(head: MTPHead | str) -> Footprint:
    """What the entries of an MTP head cost; a few at a time are computed, beside forwards that cost more."""
    if isinstance(head, str):
        return Footprint(0, 0, 0)
    cache = KVCache()
    mx.eval(head(mx.zeros((1, 1, head.hidden_size), head.dtype), mx.zeros((1, 1), dtype=mx.int32), cache))
    return Footprint(_bytes_per_token(cache), 0, 0)


def _bytes_per_token(part: KVCache | RotatingKVCache) -> int:
    slots = int(part.keys.shape[2])
    return int(part.keys.nbytes + part.values.nbytes) // max(slots, 1)
