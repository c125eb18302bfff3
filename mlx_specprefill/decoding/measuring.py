"""What forwards of a few rows cost on this machine: the numbers behind the gate. MLX thread only."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cache.positioned import leaves
from .gate import ForwardCost

__all__ = ["measure_forwards"]

_LENGTHS = (64, 4096)  # cached tokens
_REPEATS = 3


def measure_forwards(model: nn.Module, rows: Iterable[int]) -> dict[int, ForwardCost]:
    """Time forwards of so many rows on a short and on a long cache, whose keys and values are zeros."""
    wanted = sorted(set(rows))
    caches = [_filled(model, length) for length in _LENGTHS]
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(_REPEATS + 1):
        for count in wanted:
            for cache, length in zip(caches, _LENGTHS, strict=True):
                times.setdefault((count, length), []).append(_forward_ms(model, cache, count))
    return {count: _fitted(*(median(times[count, length][1:]) for length in _LENGTHS)) for count in wanted}


def _fitted(short: float, long: float) -> ForwardCost:
    per_token = max(0.0, (long - short) / (_LENGTHS[1] - _LENGTHS[0]))
    return ForwardCost(max(1e-6, short - per_token * _LENGTHS[0]), per_token)


def _forward_ms(model: nn.Module, cache: list[Any], rows: int) -> float:
    begun = time.perf_counter()
    mx.eval(mx.argmax(model(mx.zeros((1, rows), dtype=mx.int32), cache=cache), axis=-1))
    return 1e3 * (time.perf_counter() - begun)


def _filled(model: nn.Module, length: int) -> list[Any]:
    """A cache as after `length` tokens, without feeding them: full attention is what grows."""
    cache = list(make_prompt_cache(model))
    mx.eval(model(mx.zeros((1, 2), dtype=mx.int32), cache=cache))
    for part in leaves(cache):
        if type(part) is KVCache and not part.empty():
            part.state = (*(_zeros(array, length) for array in (part.keys, part.values)), length)
    mx.eval([part.state for part in cache])
    return cache


def _zeros(like: mx.array, length: int) -> mx.array:
    B, H, _, D = like.shape
    return mx.zeros((B, H, length, D), like.dtype)
