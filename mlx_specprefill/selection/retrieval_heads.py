"""Retrieval heads: a small trained attention layer on a target's first layers; together they are a draft.

A target's own retrieval heads lie in its middle. `scripts/train_retrieval_heads.py` (commit `091197e0`) trained a few
heads to do the same on the hidden states after the first layers: queries and keys of the normed states, neither values
nor positions. The output of this attention is not used and never computed: MLX is lazy, so a forward costs the keys,
and a captured one the attention of the captured rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from ..adapters.capture import record_attention
from ..adapters.depth import FirstLayers, full_draft_model, layers_of
from ..adapters.registry import adapter_for, architecture_of
from ..errors import LoadError
from .heads import DraftHeads, Head, shipped_heads

FORMAT = "mlx-specprefill retrieval heads 1"
_WITNESS = "post_attention_layernorm.weight"  # of the last first layer; never quantised
_ALIKE = 0.02  # of the witness's largest value: tolerance for half precision


class RetrievalHeads(nn.Module):  # type: ignore[misc]
    """Attention without an output: stores the keys of hidden states (B, L, D), and shows queries and keys to a capture.

    Args:
        hidden: D.
        heads: each has its own queries and keys, `width` wide.
    """

    def __init__(self, hidden: int, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.eps = eps
        self.q_proj = nn.Linear(hidden, heads * width)
        self.k_proj = nn.Linear(hidden, heads * width, bias=False)

    def __call__(self, hidden: mx.array, cache: KVCache | None = None) -> None:
        inner = mx.fast.rms_norm(hidden, None, self.eps)
        queries, keys = self._split(self.q_proj(inner)), self._split(self.k_proj(inner))
        values = keys[..., :1]  # a cache needs some
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        mask = "causal" if hidden.shape[1] > 1 else None
        mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.width**-0.5, mask=mask)

    def _split(self, x: mx.array) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, self.heads, self.width).swapaxes(1, 2)


class RetrievalDraft(FirstLayers):
    """The first layers of a model, and retrieval heads that read their hidden states.

    The heads are its last layer, with the last cache and the last attention call of a forward.
    """

    def __init__(self, whole: nn.Module, count: int, heads: RetrievalHeads) -> None:
        super().__init__(whole, count)
        self.retrieval = heads

    @property
    def layers(self) -> list[nn.Module]:
        return [*super().layers, self.retrieval]

    def make_cache(self) -> list[Any]:
        return [*super().make_cache(), KVCache()]

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        hidden = super().__call__(inputs, None if cache is None else cache[:-1])
        self.retrieval(hidden, None if cache is None else cache[-1])
        return hidden


def known_heads(draft: RetrievalDraft) -> DraftHeads:
    """Return all retrieval heads with equal weights, which need no calibration, and the model's probe that ships, if
    its caches are there.
    """
    with record_attention() as record:
        draft(mx.zeros((1, 2), dtype=mx.int32))
    call = len(record.queries) - 1
    heads = tuple(Head(call, head, 1.0) for head in range(draft.retrieval.heads))
    shipped = shipped_heads(draft.whole)
    probe = None if shipped is None else shipped.probe
    fitting = probe if probe is not None and probe.fits(draft) else None
    return DraftHeads(heads, draft.count + 1, len(layers_of(draft.whole)), {}, fitting)


def attach_heads(model: nn.Module, file: Path) -> RetrievalDraft:
    """Return the first layers of `model` with the heads from a file, in the dtype of the model's weights.

    Raises:
        LoadError: the file can't be read, is broken, or was made for another model.
    """
    layers, heads, arrays = _read(file)
    total = len(layers_of(model))
    if layers > total:
        raise LoadError(f"{file}: its heads read the first {layers} layers; the draft has {total}")
    ours, theirs = witness_of(model, layers), arrays.pop("witness")
    if ours.shape != theirs.shape or not _is_close(ours, theirs):
        raise LoadError(f"{file}: its heads were trained on another model than this draft (layer {layers} differs)")
    expected = {name: array.shape for name, array in tree_flatten(heads.parameters())}
    shapes = {name: array.shape for name, array in arrays.items()}
    if expected != shapes:
        raise LoadError(f"{file}: arrays of shapes {shapes}; its header means {expected}")
    heads.load_weights([(name, array.astype(ours.dtype)) for name, array in arrays.items()])
    mx.eval(heads.parameters())
    return RetrievalDraft(full_draft_model(model), layers, heads)


def _read(file: Path) -> tuple[int, RetrievalHeads, dict[str, mx.array]]:
    """Return the number of layers that a file's heads stand on, new heads of their shapes, and their arrays."""
    arrays: dict[str, mx.array]
    known: dict[str, str]
    try:
        arrays, known = mx.load(str(file), format="safetensors", return_metadata=True)  # type: ignore[assignment]
        if known.get("format") != FORMAT or "witness" not in arrays:
            raise ValueError("no retrieval heads that this version reads")
        layers, heads, width = (int(known[name]) for name in ("layers", "heads", "width"))
        if min(layers, heads, width) < 1:
            raise ValueError("layers, heads and width must be at least 1")
        return layers, RetrievalHeads(arrays["witness"].size, heads, width, float(known["eps"])), arrays
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise LoadError(f"{file}: {error}") from error


def witness_of(model: nn.Module, layers: int) -> mx.array:
    """Return the weights by which heads on the first `layers` know their model."""
    last: dict[str, mx.array] = dict(tree_flatten(layers_of(model)[layers - 1].parameters()))
    if _WITNESS not in last:
        raise LoadError(f"retrieval heads need layers with a {_WITNESS.removesuffix('.weight')}; this model has none")
    return last[_WITNESS]


def _is_close(ours: mx.array, theirs: mx.array) -> bool:
    difference = mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)).max()
    return bool((difference <= _ALIKE * mx.abs(theirs).max()).item())


def with_retrieval_heads(draft: nn.Module | None, draft_id: str, file: Path) -> tuple[nn.Module, str]:
    """Return the draft's first layers with retrieval heads on top, and their name.

    Raises:
        LoadError: there is no draft, these layers of it can't run alone, or the heads are another model's.
    """
    if draft is None:
        raise LoadError(f"draft_heads is {file}, but there is no draft")
    layers, _, _ = _read(file)
    refusal = adapter_for(architecture_of(draft)).depth_refusal
    if refusal is not None:
        raise LoadError(f"{file} needs the first {layers} layers of {draft_id}, which can't score: {refusal}")
    return attach_heads(draft, file), f"{draft_id} ({layers} of {len(layers_of(draft))} layers and retrieval heads)"
