"""Properties of a checkpoint's configuration, tokenizer and weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

__all__ = ["context_length", "dtype_name", "vocab_size"]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def context_length(config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    """Return the smaller of the configured context and the tokenizer's limit, in tokens."""
    known = _text_config(config)
    names = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length", "n_positions", "n_ctx")
    limits = [known[name] for name in names if isinstance(known.get(name), int) and known[name] > 0]
    stated = getattr(tokenizer, "model_max_length", None)
    if isinstance(stated, int) and 0 < stated < 10**9:
        limits.append(stated)
    return min(limits) if limits else 2**31 - 1


def vocab_size(config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    """Return the rows of the output projection; at least the tokenizer's vocabulary."""
    stated = _text_config(config).get("vocab_size")
    return stated if isinstance(stated, int) and stated > 0 else len(tokenizer.get_vocab())


def dtype_name(model: nn.Module) -> str:
    sizes: dict[str, int] = {}
    for _, array in nn.utils.tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + int(array.size)
    return max(sizes, key=lambda name: sizes[name]) if sizes else "none"
