"""Bytes of a model, measured: weights, one sequence's cache per token, the largest forward. Warms a GPU up before."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from ..cache.positioned import fill, leaves

_SHORT = 128  # tokens of the first measuring forward
_FAR, _DEPTH = 32, 2048  # tokens of the second one, and cached tokens before them
_WARMING = 512  # tokens, of which a mixture sends some to every expert
_FEW = 29  # ids that every vocabulary has
log = logging.getLogger(__name__)
# Queries times keys of one prefill forward. A larger forward may exceed the time that a GPU's watchdog allows.
MOST_PAIRS = 2048 * 32768


def cache_bytes(cache: Seq[Any]) -> int:
    """Return the bytes of a prompt cache's arrays with their room to grow. Layers that report no size count as 0."""
    total = 0
    for part in leaves(cache):
        try:
            total += int(part.nbytes)
        except NotImplementedError:
            continue
    return total


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one sequence in one model, measured at start-up.

    Attributes:
        per_token: bytes of KV cache per stored token.
        constant: bytes per sequence whatever its length (recurrent state, full windows).
        per_row: bytes that a forward needs for each of its tokens.
        per_pair: bytes that it needs per token and key, for attention scores that no fused kernel avoids.
    """

    per_token: int
    constant: int
    per_row: float = 0.0
    per_pair: float = 0.0

    def of_held(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` stored tokens, between two forwards."""
        return self.per_token * tokens + self.constant

    def working(self, tokens: int, step: int) -> int:
        """Return the bytes of the largest forward when `tokens` tokens are prefilled in forwards of at most `step`."""
        rows = min(step, tokens)
        return round(self.per_row * rows + self.per_pair * min(rows * tokens, MOST_PAIRS))


def weight_bytes(model: nn.Module, beside: nn.Module | None = None) -> int:
    """Return the bytes of the loaded parameters that `beside` does not share: a draft can be a part of its target."""
    return sum(weights_by_array(model, beside).values()) - sum(weights_by_array(beside).values())


def weights_by_array(*models: nn.Module | None) -> dict[int, int]:
    """Return the bytes of these models' arrays by identity, including layers that a draft does not run."""
    parts = [part for model in models for part in (model, getattr(model, "whole", None)) if part is not None]
    return {id(array): int(array.nbytes) for part in parts for _, array in tree_flatten(part.parameters())}


def measure_footprint(model: nn.Module | None, context: int | None = None) -> Footprint:
    """Measure the cache's arrays, and the allocator's peak in two short forwards: at the start, and behind many tokens.

    The additional memory per token of the second forward is that of the attention scores. It depends on the device, the
    heads' size and MLX. Windows stay empty: full attention needs more than they do.

    Args:
        context: positions that the model supports; None: as many as are measured.
    """
    if model is None:
        return Footprint(0, 0)
    cache = list(make_prompt_cache(model))
    _peak(model, cache, 2)  # makes the cache's arrays, with room for the next forward
    per_row = _peak(model, cache, _SHORT) / _SHORT
    depth = min(_DEPTH, (context or _DEPTH + _FAR) - _FAR)
    if depth <= 2 * _SHORT:
        return replace(cache_footprint(cache), per_row=per_row)
    fill(cache, depth)
    more = max(0.0, _peak(model, cache, _FAR) / _FAR - per_row)
    per_pair = more / (depth + _FAR - _SHORT)
    return replace(cache_footprint(cache), per_row=max(0.0, per_row - per_pair * _SHORT), per_pair=per_pair)


def _peak(model: nn.Module, cache: list[Any], tokens: int) -> int:
    """Return the peak bytes of a forward of `tokens` tokens, above those in use before."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    model(random_tokens(model, tokens), cache=cache)
    mx.eval([part.state for part in cache])
    return int(mx.get_peak_memory()) - before


def random_tokens(model: nn.Module, count: int) -> mx.array:
    """Return ids (1, count) of the model's vocabulary: equal ones would all go to the same experts."""
    parts = getattr(model, "whole", model).modules()
    rows = [part.weight.shape[0] for part in parts if isinstance(part, (nn.Embedding, nn.QuantizedEmbedding))]
    return mx.random.randint(0, min(rows, default=_FEW), (1, count), key=mx.random.key(count))


def warm_up(*models: nn.Module | None) -> None:
    """Let a GPU make its kernels, and read every expert once: the first prompt would take several times as long."""
    if not _on_gpu():
        return
    log.info("warming up")
    for model in models:
        if model is not None:
            cache = list(make_prompt_cache(model))
            model(random_tokens(model, _WARMING), cache=cache)
            mx.eval([part.state for part in cache])


def _on_gpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.gpu))


def cache_footprint(cache: list[Any]) -> Footprint:
    """Return the footprint of a filled cache. Reads no array."""
    per_token = constant = 0
    for part in leaves(cache):
        if isinstance(part, ArraysCache):
            constant += int(part.nbytes)
        elif isinstance(part, RotatingKVCache):
            constant += _bytes_per_token(part) * int(part.max_size)
        elif getattr(part, "keys", None) is not None:
            per_token += _bytes_per_token(part)
    return Footprint(per_token, constant)


def _bytes_per_token(part: KVCache | RotatingKVCache) -> int:
    slots = int(part.keys.shape[2])
    return int(part.keys.nbytes + part.values.nbytes) // max(slots, 1)
