"""Reads the prompt of a sparse turn in full, into the exact cache, behind what is dense already."""

from __future__ import annotations

from collections.abc import Generator

import mlx.core as mx
import numpy as np

from ..cache.positioned import can_cut
from ..events import Progress, PromptLogprobs
from ..request import GenerationRequest
from ..specprefill.plan import READ_ALL
from ..specprefill.sparse_prefill import HiddenStates, UpperLayersModel, prefill
from .prefill import Prefiller
from .sequence import Sequence


def densify(
    prefiller: Prefiller, request: GenerationRequest, selection_key: str | None
) -> Generator[Progress | PromptLogprobs, None, tuple[Sequence, mx.array]]:
    """Prefill the prompt into the exact cache. May be interrupted at every chunk; cancelled, it keeps them.

    Args:
        selection_key: `Sequence.selection_key` of the sparse turn with this text.

    Returns:
        The sequence with its cache, and the logits of the last token, (1, V).
    """
    sequence = Sequence(-1, request, READ_ALL)
    yield from prefiller.resume(sequence, again=True)
    yield from _densify_upper_layers(prefiller, sequence, selection_key)
    logits = yield from prefiller.read_all(sequence)
    sequence.store()
    if prefiller.is_stateful:  # the next turn begins with all of it: the sparse turn has a state at its end
        sequence.keep_prompt(prefiller.caches, len(request.prompt))
    return sequence, logits


def _densify_upper_layers(
    prefiller: Prefiller, sequence: Sequence, selection_key: str | None
) -> Generator[Progress, None, None]:
    """Run the upper layers over all tokens that the lower layers have read. No-op for turns that are not staged.

    The sequence's cache and the exact cache then hold the text. Cancelled, nothing is kept.
    """
    model, request, S = prefiller.pair.stages, sequence.request, sequence.cached
    if model is None or selection_key is None or not can_cut(sequence.cache):
        return  # windows and states need checkpoints
    turn = yield from prefiller.caches.target_prefix(request.prompt, request.label, True, selection_key)
    if turn is None or turn.held is None:
        return
    hidden = HiddenStates(S, S, turn.hidden)
    lower = yield from prefiller.caches.draft_prefix(request.prompt[: hidden.end + 1], request.label)
    if lower is None or not hidden.covers(np.arange(S, lower.length, dtype=np.int32)) or lower.length <= S:
        return
    indices = np.arange(S, lower.length, dtype=np.int32)
    _, upper = model.split(sequence.cache)
    yield Progress("prefill", 0, lower.length - S, cached=S)
    text, states = request.prompt[S : lower.length], hidden.of(indices)
    upper_model = UpperLayersModel(model.upper, states)
    yield from prefill(upper_model, upper, text, indices - S, prefiller.step, S)
    sequence.cache, sequence.cached = model.join(lower.cache, upper), lower.length
    sequence.keep_prompt(prefiller.caches, lower.length)
