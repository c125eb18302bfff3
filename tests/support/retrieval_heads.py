"""Writes retrieval heads to a file as `draft_heads` of a pair names it, in the format of the shipped ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_specprefill.selection.retrieval_heads import FORMAT, RetrievalHeads, witness_of


def write_heads(file: Path, heads: RetrievalHeads, model: nn.Module, layers: int, about: Mapping[str, str]) -> None:
    """Store heads that were trained on the hidden states after the first `layers` of `model`.

    Args:
        about: origin, licence.
    """
    arrays = {name: array.astype(mx.float16) for name, array in tree_flatten(heads.parameters())}
    facts = {"layers": layers, "heads": heads.heads, "width": heads.width, "eps": heads.eps}
    known = {"format": FORMAT, **{name: str(value) for name, value in facts.items()}, **about}
    witness = witness_of(model, layers).astype(mx.float32)
    mx.save_safetensors(str(file), arrays | {"witness": witness}, known)
