"""The part of a draft that reads prompts: its first layers, with or without trained heads."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn

from ..errors import LoadError, SparseUnsupportedError
from .depth import first_layers, layers_of
from .registry import adapter_for, architecture_of
from .retrieval_heads import attach_heads, heads_file_layers

__all__ = ["truncate_layers", "with_retrieval_heads"]


def truncate_layers(draft: nn.Module | None, draft_id: str, count: int) -> tuple[nn.Module, str]:
    """Return the draft's first layers, and their name.

    Raises:
        LoadError: there is no draft, or these layers can't score.
    """
    if draft is None:
        raise LoadError(f"draft_layers is {count}, but there is no draft")
    total = len(layers_of(draft))
    if count < total:
        _check_depth(draft, draft_id, count)
    try:
        cut = first_layers(draft, count)
    except (ValueError, SparseUnsupportedError) as error:
        raise LoadError(f"draft_layers is {count}, but of {draft_id}: {error}") from error
    return cut, f"{draft_id} ({count} of {total} layers)"


def with_retrieval_heads(
    draft: nn.Module | None, draft_id: str, count: int | None, file: Path
) -> tuple[nn.Module, str]:
    """Return the draft's first layers with retrieval heads on top, and their name.

    Raises:
        LoadError: there is no draft, these layers of it can't run alone, or the heads are another model's.
    """
    if draft is None:
        raise LoadError(f"draft_heads is {file}, but there is no draft")
    layers = heads_file_layers(file)
    if count not in (None, layers):
        raise LoadError(f"draft_layers is {count}, but the heads in {file} stand on the first {layers} layers")
    _check_depth(draft, draft_id, layers)
    return attach_heads(draft, file), f"{draft_id} ({layers} of {len(layers_of(draft))} layers and retrieval heads)"


def _check_depth(draft: nn.Module, draft_id: str, count: int) -> None:
    refusal = adapter_for(architecture_of(draft)).depth_refusal
    if refusal is not None:
        raise LoadError(f"draft_layers is {count}, but {draft_id} can't score: {refusal}")
