"""Checks at start-up, computed: explicit positions; float16; quantised caches; the draft.

The verified table covers architectures; a checkpoint can enable an untested variant. A few forwards of at most 12
tokens compare the position mapping with ordinary forwards of the same model, layer by layer on the same hidden states:
rounding does not accumulate, and no other layer hides what one does. Nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..arrays import Positions
from ..cache.positioned import Positioned, leaves, make_positioned_cache, place, quantize_kv
from ..distributed.ranks import Ranks, broadcast, refuse_together
from ..errors import SparseUnsupportedError
from .depth import Observed, layers_of, replace_layers
from .registry import adapter_for, architecture_of
from .relay import Hidden, Relay

_COUNT = 12
TOKENS = [(7 * i + 3) % 29 for i in range(_COUNT)]  # every vocabulary has small ids
_GAPPED = np.array([0, 1, 2, 9, 10, 23, 24, 40, 41, 58, 77, 90], dtype=np.int32)
_SPLIT = 5  # the gapped prompt has two chunks: the second one meets a cache with gaps
_SHIFT = 7
# What one layer's rounding may change, relative to the largest value. Keys rotated by other angles differ by some .3.
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}

FLOAT16_MAX = 65504.0


def _refusal(check: Callable[[], str | None], words: str) -> str | None:
    """Return the result of a check. A check that raises refuses the model with these words."""
    try:
        return check()
    except SparseUnsupportedError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever model code raises here means the same: not this model
        return f"{words} ({type(error).__name__}: {error})"


def probe_sparse(model: nn.Module) -> str | None:
    """Return why the model must be prefilled fully; None if it follows explicit positions."""
    return _refusal(lambda: _probe(model), "its forward pass fails at explicit positions")


def probe_quantized(model: nn.Module, cache: list[Any], bits: int) -> str | None:
    """Return why the model can't decode with a quantised KV cache; None if it can.

    mlx-lm's attention can, but some models have their own.

    Args:
        cache: an empty one, plain or positioned; not to be used again.
    """

    def check() -> None:
        mx.eval(model(mx.array([TOKENS]), cache=cache))
        quantized, _ = quantize_kv(cache, bits)
        mx.eval(model(mx.array([TOKENS[:1]]), cache=quantized))

    return _refusal(check, "its attention can't read quantised keys and values")


def _probe(model: nn.Module) -> str | None:
    relay = Relay(model)
    stock = _feed(relay, make_prompt_cache(model), [_COUNT])
    tolerance = _tolerance(relay, stock)
    contiguous = _at_positions(relay, np.arange(_COUNT, dtype=np.int32))
    gapped = _at_positions(relay, _GAPPED)
    # Single tokens have one integer offset: mlx-lm's own path through every RoPE.
    single = _feed(relay, make_positioned_cache(model), [1] * _COUNT, lambda cache, at: place(cache, _GAPPED[at]))
    absolute = adapter_for(architecture_of(model)).absolute
    moved = None if absolute else _at_positions(relay, _GAPPED + _SHIFT)
    # All runs come first: ranks that see different parts of a model compare on their own.
    if not all(bool(mx.isfinite(run.logits).all().item()) for run in (stock, gapped, single)):
        return "its logits are not finite"
    if not _agree(contiguous._replace(keys=[]), stock, tolerance):
        return "explicit contiguous positions change its logits"
    if not _agree(gapped, single, tolerance):
        return "a chunk with gaps differs from the same tokens fed one by one"
    # Keys turn with their positions; other angles are rounded otherwise.
    if moved is not None and not _agree(moved._replace(keys=[]), gapped, 2 * tolerance):
        return "moving all positions by the same amount changes its logits"
    return None


class _Run(NamedTuple):
    """A forward of the probe's tokens.

    Attributes:
        logits: (T, V).
        hidden: what came to each layer, by layer, call and token, each (1, 1, ...).
        keys: what the layers stored of each token, (1, heads, T, D).
    """

    logits: mx.array
    hidden: Hidden
    keys: list[mx.array]


def _feed(
    relay: Relay, cache: list[Any], sizes: Sequence[int], before: Callable[[list[Any], slice], None] | None = None
) -> _Run:
    """Feed the probe's tokens in chunks of `sizes`. Later runs give the layers what came to them in the first."""

    def read(tokens: mx.array, part: slice) -> Any:
        if before is not None:
            before(cache, part)
        return relay.model(tokens, cache=cache)

    logits = _in_chunks(relay, read, sizes)
    hidden = relay.arrived()
    relay.given = relay.given or hidden
    return _Run(mx.concatenate(logits), hidden, _keys(cache))


def _in_chunks(relay: Relay, read: Callable[[mx.array, slice], Any], sizes: Sequence[int]) -> list[mx.array]:
    """Return the logits (T, V) of each chunk."""
    logits, start = [], 0
    for size in sizes:
        relay.expect(range(start, start + size))
        logits.append(read(mx.array([TOKENS[start : start + size]]), slice(start, start + size))[0])
        mx.eval(logits[-1])
        start += size
    return logits


def _keys(cache: Sequence[Any]) -> list[mx.array]:
    """Return keys and values of all attention with positions, in the order of its layers. No ring is full yet."""
    held = [part for part in leaves(cache) if isinstance(part, Positioned) and not part.empty()]
    return [array[:, :, : part.slots] for part in held for array in part.inner.state[:2]]


def _tolerance(relay: Relay, stock: _Run) -> float:
    """Return the tolerance of the type in which the model computes. Where its layers are called part by part, rounding
    accumulates: some times the rounding of tokens fed one by one.
    """
    least = _TOLERANCE.get(stock.logits.dtype, 4e-2)
    if stock.hidden:
        return least
    singly = _feed(relay, make_prompt_cache(relay.whole), [1] * _COUNT)
    return max(least, 4 * _distance(stock.logits, singly.logits))


def _at_positions(relay: Relay, positions: Positions) -> _Run:
    def explicit(cache: list[Any], part: slice) -> None:
        """Set positions as a matrix even without gaps, so that the mapping runs."""
        on_device = mx.array(positions[part])[None]
        for layer in leaves(cache):
            if isinstance(layer, Positioned):
                layer._placed = (positions[part], on_device)

    return _feed(relay, make_positioned_cache(relay.whole), [_SPLIT, _COUNT - _SPLIT], explicit)


def _agree(one: _Run, other: _Run, tolerance: float) -> bool:
    """Return whether two runs differ by rounding only, in what came to each layer, in the logits and in the keys."""
    pairs = [(one.logits, other.logits), *_shared(one.hidden, other.hidden)]
    for a, b in zip(one.keys, other.keys, strict=False):
        if a.shape == b.shape:
            pairs.append((mx.moveaxis(a[0], 1, 0), mx.moveaxis(b[0], 1, 0)))
    return all(_distance(a, b) < tolerance for a, b in pairs)


def _shared(one: Hidden, other: Hidden) -> list[tuple[mx.array, mx.array]]:
    """Return what came to each call of a layer in both runs, (T, ...)."""
    tokens: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for key in sorted(one.keys() & other.keys()):
        tokens.setdefault(key[:2], []).append(key)
    return [
        (mx.concatenate([one[key][0] for key in keys]), mx.concatenate([other[key][0] for key in keys]))
        for keys in tokens.values()
    ]


def _distance(a: mx.array, b: mx.array) -> float:
    """Return the median over tokens, the first axis, of the largest difference, relative to the largest value.

    In half precision a mixture-of-experts router may flip on one token, which does not affect the median.
    """
    a, b = (array.reshape(array.shape[0], -1).astype(mx.float32) for array in (a, b))
    worst = mx.abs(a - b).max(axis=-1) / mx.maximum(mx.abs(b).max(), 1e-9)
    return float(np.median(np.array(worst)))


def largest_hidden(model: nn.Module) -> float:
    """Return the largest magnitude that a layer returns in one forward; infinity if one overflows.

    float16 ends at 65 504. Models are trained in bfloat16, whose range is that of float32: in float16 hidden values
    that are too large become infinite, and every answer nonsense.

    Layers that are called part by part are only checked for overflows.
    """
    returned: list[Any] = []
    watched = replace_layers(model, {id(layer): Observed(layer, returned) for layer in layers_of(model)})
    logits = watched(mx.array([TOKENS]), cache=make_prompt_cache(model))
    magnitudes = [mx.abs(each[0] if isinstance(each, tuple) else each).max() for each in returned]
    magnitudes.append(mx.where(mx.isnan(logits).any(), mx.inf, 0.0))
    largest = float(np.array(mx.stack(magnitudes).max().astype(mx.float32)))
    return largest if math.isfinite(largest) else math.inf


def sparse_refusal(target: nn.Module, draft: nn.Module | None, ranks: Ranks | None) -> str | None:
    """Return why one rank or another can't prefill sparsely; None if all can.

    Args:
        draft: on rank 0; the others may have none.
    """
    of_draft = broadcast(ranks, "draft's refusal", lambda: _of_draft(draft))
    refusal = of_draft or refuse_together(ranks, _of_caches(target, ranks))
    if refusal is not None:
        return refusal
    # Ranks compute the probe together.
    return refuse_together(ranks, probe_sparse(target))


def _of_draft(draft: nn.Module | None) -> str | None:
    if draft is None:
        return "no draft model is loaded"
    refusal = adapter_for(architecture_of(draft)).draft_refusal
    return None if refusal is None else f"the draft can't score: {refusal}"


def _of_caches(target: nn.Module, ranks: Ranks | None) -> str | None:
    refusal = adapter_for(architecture_of(target)).sparse_refusal
    if refusal is not None:
        return refusal
    try:
        cache = make_positioned_cache(target)
    except SparseUnsupportedError as error:
        return str(error)
    if ranks is not None and not any(isinstance(part, Positioned) for part in leaves(cache)):
        return "this machine has none of its attention layers"
    return None
