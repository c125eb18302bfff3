"""What forwards of a few rows cost on this machine; `gain` predicts from it. MLX thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..adapters.mtp import MTPHead
from ..cache.positioned import leaves
from .gain import ForwardCost

__all__ = ["measure_forwards", "measure_head"]

_LENGTHS = (64, 4096)  # cached tokens
_REPEATS = 3

Forward = Callable[[int, list[Any]], mx.array]  # of so many rows, on a cache; logits (1, R, V)


def measure_forwards(model: nn.Module, rows: Iterable[int]) -> dict[int, ForwardCost]:
    """Time forwards of so many rows on a short and on a long cache, whose keys and values are zeros."""

    def forward(count: int, cache: list[Any]) -> mx.array:
        logits: mx.array = model(mx.zeros((1, count), dtype=mx.int32), cache=cache)
        return logits

    return _measured(forward, lambda: list(make_prompt_cache(model)), rows)


def measure_head(head: MTPHead) -> ForwardCost:
    """Of one row, the projection to logits included."""

    def forward(count: int, cache: list[Any]) -> mx.array:
        hidden = mx.zeros((1, count, head.hidden_size), head.dtype)
        return head.logits(head(hidden, mx.zeros((1, count), dtype=mx.int32), cache[0]))

    return _measured(forward, lambda: [KVCache()], (1,))[1]


def _measured(forward: Forward, empty: Callable[[], list[Any]], rows: Iterable[int]) -> dict[int, ForwardCost]:
    wanted = sorted(set(rows))
    caches = [_filled(forward, empty(), length) for length in _LENGTHS]
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(_REPEATS + 1):
        for count in wanted:
            for cache, length in zip(caches, _LENGTHS, strict=True):
                times.setdefault((count, length), []).append(_forward_ms(forward, cache, count))
    return {count: _fitted(*(median(times[count, length][1:]) for length in _LENGTHS)) for count in wanted}


def _fitted(short: float, long: float) -> ForwardCost:
    per_token = max(0.0, (long - short) / (_LENGTHS[1] - _LENGTHS[0]))
    return ForwardCost(max(1e-6, short - per_token * _LENGTHS[0]), per_token)


def _forward_ms(forward: Forward, cache: list[Any], rows: int) -> float:
    begun = time.perf_counter()
    mx.eval(mx.argmax(forward(rows, cache), axis=-1))
    return 1e3 * (time.perf_counter() - begun)


def _filled(forward: Forward, cache: list[Any], length: int) -> list[Any]:
    """A cache as after `length` tokens, without feeding them: full attention is what grows."""
    mx.eval(forward(2, cache))
    for part in leaves(cache):
        if type(part) is KVCache and not part.empty():
            part.state = (*(_zeros(array, length) for array in (part.keys, part.values)), length)
    mx.eval([part.state for part in cache])
    return cache


def _zeros(like: mx.array, length: int) -> mx.array:
    B, H, _, D = like.shape
    return mx.zeros((B, H, length, D), like.dtype)
