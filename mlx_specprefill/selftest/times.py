"""Measures this device: a synchronisation, and a target's forwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cache.positioned import leaves
from ..engine.costs import ForwardCost, LearntCost
from ..loading import ModelPair

__all__ = ["ForwardTimes", "forward_times", "sync_ms"]

_LENGTHS = tuple(2**power for power in range(12))  # 1 to 2048 tokens
_FITTED = 128  # tokens from which on a forward reads nearly all experts of a mixture
_LONGEST_MS, _LONG_MS = 30_000.0, 2_000.0  # of a forward: longer ones are not measured, or only once
_CHUNK, _BEHIND = 512, 16384


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Times and memory of a target's forwards.

    Attributes:
        ms: medians at the start of a prompt, by the forward's tokens.
        fixed_ms, token_ms, pair_ms: what is fixed, and what each token and each pair of a token and one that it attends
            to takes, fitted to 128 tokens and more.
        behind_ms: of 512 tokens behind 16 384 others; `behind_bytes`: what they need beside weights and cache.
    """

    ms: dict[int, float]
    fixed_ms: float
    token_ms: float
    pair_ms: float
    behind_ms: float
    behind_bytes: int


def sync_ms() -> float:
    """Return the milliseconds from queueing a small operation to its result, a median."""
    return median(_times(lambda: mx.eval(mx.zeros(8) + 1), 200))


def forward_times(pair: ModelPair) -> ForwardTimes:
    """Measure the target's forwards on this thread. Skips lengths that would take too long."""
    model, ms, learnt = pair.target, dict[int, float](), LearntCost(ForwardCost(0, 0, 0))
    for tokens in _LENGTHS:
        expected = 2 * max(ms.values(), default=0.0)
        if expected > _LONGEST_MS:
            break
        repeats = 1 if expected > _LONG_MS else 3
        taken = _times(lambda: _forward(model, make_prompt_cache(model), tokens), 1 + repeats)[1:]  # noqa: B023
        ms[tokens] = median(taken)
        if tokens >= _FITTED:
            for once in taken:
                learnt.observe(tokens, 0, once)
    cache = _behind(model)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    (behind_ms,) = _times(lambda: _forward(model, cache, _CHUNK), 1)
    peak = int(mx.get_peak_memory() - before)
    learnt.observe(_CHUNK, _BEHIND, behind_ms)
    cost = learnt.cost
    return ForwardTimes(ms, cost.fixed, cost.token, cost.pair, behind_ms, peak)


def _times(run: Callable[[], None], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def _forward(model: nn.Module, cache: list[Any], tokens: int) -> None:
    model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
    mx.eval([part.state for part in cache])


def _behind(model: nn.Module) -> list[Any]:
    """Return a cache with many tokens, which are zeros, in full attention only."""
    cache = list(make_prompt_cache(model))
    _forward(model, cache, 2)
    for part in leaves(cache):
        if type(part) is KVCache and not part.empty():
            held = [mx.zeros((*array.shape[:2], _BEHIND, array.shape[3]), array.dtype) for array in part.state[:2]]
            part.state = (*held, _BEHIND)
    mx.eval([part.state for part in cache])
    return cache
