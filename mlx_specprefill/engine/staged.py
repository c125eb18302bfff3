"""Staged prefill of one request: the target's first layers read and score the prompt, the others read the kept tokens.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..cache.positioned import can_cut
from ..loading import ModelPair
from ..request import GenerationRequest, Progress
from ..specprefill.plan import PrefillPlan
from ..specprefill.staged_prefill import HiddenStates, UpperLayersModel, prefill_upper
from .caches import EngineCaches
from .sequence import Sequence

__all__ = ["is_staged", "read_rest", "upper_layers"]

Kept = npt.NDArray[np.int32]


def is_staged(pair: ModelPair, request: GenerationRequest, plan: PrefillPlan) -> bool:
    """Return whether the target's own first layers score the prompt.

    The paper's rule looks ahead with all layers, and a request with its own scores needs no scoring.
    """
    return pair.stages is not None and plan.rule != "paper" and request.specprefill.importance is None


def upper_layers(
    pair: ModelPair, sequence: Sequence, parts: tuple[Kept, Kept], lower: list[Any]
) -> tuple[tuple[UpperLayersModel, UpperLayersModel], list[Any]]:
    """Return the upper layers as models of two parts of the prompt, and their caches.

    From then on the sequence's cache is that of all layers.

    Args:
        parts: prompt indices, ascending.
        lower: caches of the layers that have read the prompt.
    """
    model, hidden = pair.stages, sequence.hidden
    assert model is not None
    assert hidden is not None
    _, upper = model.split(sequence.cache)
    sequence.cache, sequence.staged = model.join(lower, upper), True
    first, second = (hidden.of(indices) for indices in parts)
    mx.eval(first, second)
    return (UpperLayersModel(model.upper, first), UpperLayersModel(model.upper, second)), upper


def read_rest(
    pair: ModelPair,
    caches: EngineCaches,
    sequence: Sequence,
    choice: str | None,
    prefill_chunk_size: Callable[[str], int],
) -> Generator[Progress, None, None]:
    """Run the upper layers over all tokens that the lower layers have read. No-op for turns that are not staged.

    The sequence's cache and the exact cache then hold the text. Cancelled, nothing is kept.
    """
    model, request, S = pair.stages, sequence.request, sequence.cached
    if model is None or choice is None or not can_cut(sequence.cache):  # windows and states need checkpoints
        return
    turn = caches.target_prefix(request.prompt, request.label, True, choice)
    if turn is None or turn.held is None:
        return
    hidden = HiddenStates(S, S, turn.hidden)
    lower = caches.draft_prefix(request.prompt[: hidden.end + 1], request.label)
    if lower is None or not hidden.covers(np.arange(S, lower.length, dtype=np.int32)) or lower.length <= S:
        return
    indices = np.arange(S, lower.length, dtype=np.int32)
    _, upper = model.split(sequence.cache)
    yield Progress("prefill", 0, lower.length - S, cached=S)
    text, states = request.prompt[S : lower.length], hidden.of(indices)
    yield from prefill_upper(model, upper, text, states, indices - S, lambda: prefill_chunk_size("prefill"), S)
    sequence.cache, sequence.cached = model.join(lower.cache, upper), lower.length
    caches.keep_target(request.prompt[: lower.length], sequence.cache, request)
