"""Checks at start-up: the model follows explicit positions, its hidden values fit into float16, its draft serves it.

The verified table covers architectures; a checkpoint can enable an untested variant. A few forwards of at most 12
tokens compare the position mapping with ordinary forwards of the same model. Nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from ..cache.positioned import Positioned, leaves, make_positioned_cache, place, quantize_kv
from ..distributed.ranks import Ranks, broadcast
from ..errors import SparseUnsupportedError
from .depth import FirstLayers, Observed, layers_of, replace_layers
from .registry import adapter_for, architecture_of
from .staged import StagedModel

Positions = npt.NDArray[np.int32]

_COUNT = 12
TOKENS = [(7 * i + 3) % 29 for i in range(_COUNT)]  # every vocabulary has small ids
_GAPPED = np.array([0, 1, 2, 9, 10, 23, 24, 40, 41, 58, 77, 90], dtype=np.int32)
_SPLIT = 5  # the gapped prompt has two chunks: the second one meets a cache with gaps
_SHIFT = 7
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
        _forward(model, cache, [_COUNT])
        quantized, _ = quantize_kv(cache, bits)
        _forward(model, quantized, [1])

    return _refusal(check, "its attention can't read quantised keys and values")


def staged_model(target: nn.Module, draft: nn.Module | None) -> StagedModel | str:
    """Return the target in two parts, of which the draft is the first, or why it can't be split."""
    if not isinstance(draft, FirstLayers) or draft.whole is not target:
        return "the draft is not the target's own first layers"
    refusal = adapter_for(architecture_of(target)).staged_refusal
    if refusal is not None:
        return refusal
    try:
        model = StagedModel(target, draft.count)
        _, upper = model.split(make_positioned_cache(target))
    except SparseUnsupportedError as error:
        return str(error)
    if not any(isinstance(part, Positioned) for part in leaves(upper)):
        return f"no layer behind the first {draft.count} has attention"
    return probe_staged(model) or model


def probe_staged(model: StagedModel) -> str | None:
    """Return why the model's two parts differ from the model, or ignore positions; None if they agree."""
    return _refusal(lambda: _probe_parts(model), "its forward pass fails in two parts")


def _probe_parts(model: StagedModel) -> str | None:
    stock, tolerance = _stock(model.whole)
    contiguous = np.arange(_COUNT, dtype=np.int32)
    if not _distance(_in_parts(model, contiguous, [_SPLIT, _COUNT - _SPLIT])[:_COUNT], stock) < tolerance:
        return "its layers in two parts differ from the model"
    chunks, single = (_in_parts(model, _GAPPED, sizes) for sizes in ([_SPLIT, _COUNT - _SPLIT], [1] * _COUNT))
    if not _distance(chunks, single) < tolerance:
        return "behind the first layers, a chunk with gaps differs from the same tokens fed one by one"
    return None


def _in_parts(model: StagedModel, positions: Positions, sizes: Sequence[int]) -> mx.array:
    """Run the first layers over a longer text, the others over the probe's tokens at `positions` in chunks, then the
    model over one more; return the logits (13, V).
    """
    text = np.arange(positions[-1] + 1, dtype=np.int32) % 29
    text[positions] = TOKENS
    cache = make_positioned_cache(model.whole)
    lower, upper = model.split(cache)
    hidden = model.lower(mx.array(text)[None], cache=lower)[:, mx.array(positions)]

    def read(tokens: mx.array, start: int) -> mx.array:
        return model.upper(tokens, hidden[:, start : start + tokens.shape[1]], upper)

    logits, start = [], 0
    for size in sizes:
        place(upper, positions[start : start + size])
        logits.append(read(mx.array(TOKENS[start : start + size])[None], start)[0])
        mx.eval(logits[-1], [part.state for part in cache])
        start += size
    model.unite(cache, positions)
    logits.append(model.whole(mx.array([TOKENS[:1]]), cache=cache)[0])
    return mx.concatenate(logits)


def _probe(model: nn.Module) -> str | None:
    stock, tolerance = _stock(model)
    contiguous = np.arange(_COUNT, dtype=np.int32)
    gapped = _at_positions(model, _GAPPED)
    # Single tokens have one integer offset: mlx-lm's own path through every RoPE.
    single = _forward(model, make_positioned_cache(model), [1] * _COUNT, lambda cache, at: place(cache, _GAPPED[at]))
    if not all(bool(mx.isfinite(logits).all().item()) for logits in (stock, gapped, single)):
        return "its logits are not finite"
    if not _distance(_at_positions(model, contiguous), stock) < tolerance:
        return "explicit contiguous positions change its logits"
    if not _distance(gapped, single) < tolerance:
        return "a chunk with gaps differs from the same tokens fed one by one"
    if adapter_for(architecture_of(model)).absolute:
        return None
    if not _distance(_at_positions(model, _GAPPED + _SHIFT), gapped) < 2 * tolerance:  # other angles, other rounding
        return "moving all positions by the same amount changes its logits"
    return None


def _forward(
    model: nn.Module, cache: list[Any], sizes: Sequence[int], before: Callable[[list[Any], slice], None] | None = None
) -> mx.array:
    """Feed the probe's tokens in chunks of `sizes`; return their logits, (12, V)."""
    logits, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        if before is not None:
            before(cache, part)
        logits.append(model(mx.array(TOKENS[part])[None], cache=cache)[0])
        mx.eval(logits[-1])
        start += size
    return mx.concatenate(logits)


def _stock(model: nn.Module) -> tuple[mx.array, float]:
    """Return the logits without any mapping, and their tolerance: some times the rounding of tokens fed one by one."""
    logits, singly = (_forward(model, make_prompt_cache(model), sizes) for sizes in ([_COUNT], [1] * _COUNT))
    return logits, max(_TOLERANCE.get(logits.dtype, 4e-2), 4 * _distance(logits, singly))


def _at_positions(model: nn.Module, positions: Positions) -> mx.array:
    def explicit(cache: list[Any], part: slice) -> None:
        """Set positions as a matrix even without gaps, so that the mapping runs."""
        on_device = mx.array(positions[part])[None]
        for layer in leaves(cache):
            if isinstance(layer, Positioned):
                layer._placed = (positions[part], on_device)

    return _forward(model, make_positioned_cache(model), [_SPLIT, _COUNT - _SPLIT], explicit)


def _distance(a: mx.array, b: mx.array) -> float:
    """Return the median over tokens of the largest difference, relative to the largest logit.

    In half precision a mixture-of-experts router may flip on one token, which does not affect the median.
    """
    a, b = a.astype(mx.float32), b.astype(mx.float32)
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
    refusal = of_draft or _of_target(target)
    if ranks is None:
        return refusal
    holds = refusal is None and any(isinstance(part, Positioned) for part in leaves(make_positioned_cache(target)))
    if ranks.all(holds):
        return None
    return ranks.broadcast("refusal", lambda: refusal) or "one of the machines has none of its attention layers"


def _of_draft(draft: nn.Module | None) -> str | None:
    if draft is None:
        return "no draft model is loaded"
    refusal = adapter_for(architecture_of(draft)).draft_refusal
    return None if refusal is None else f"the draft can't score: {refusal}"


def _of_target(target: nn.Module) -> str | None:
    refusal = adapter_for(architecture_of(target)).sparse_refusal
    if refusal is not None:
        return refusal
    try:
        make_positioned_cache(target)
    except SparseUnsupportedError as error:
        return str(error)
    return probe_sparse(target)
