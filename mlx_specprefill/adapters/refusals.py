"""Reasons against sparse prefill of a target with a draft."""

from __future__ import annotations

import mlx.nn as nn

from ..cache.positioned import Positioned, leaves, make_positioned_cache
from ..distributed.ranks import Ranks, agreed
from ..errors import SparseUnsupportedError
from .probe import probe_sparse
from .registry import adapter_for, architecture_of

__all__ = ["sparse_refusal"]


def sparse_refusal(target: nn.Module, draft: nn.Module | None, ranks: Ranks | None) -> str | None:
    """Return why one rank or another can't prefill sparsely; None if all can.

    Args:
        draft: on rank 0; the others may have none.
    """
    of_draft = agreed(ranks, "draft's refusal", lambda: _of_draft(draft))
    refusal = of_draft or _of_target(target)
    if ranks is None:
        return refusal
    holds = refusal is None and any(isinstance(part, Positioned) for part in leaves(make_positioned_cache(target)))
    if ranks.every(holds):
        return None
    return ranks.agree("refusal", lambda: refusal) or "one of the machines has none of its attention layers"


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
        return error.reason
    return probe_sparse(target)
