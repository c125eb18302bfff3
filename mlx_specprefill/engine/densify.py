"""Reads the prompt of a sparse turn in full, into the exact cache, behind what is dense already."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

import mlx.core as mx
import numpy as np

from ..cache.positioned import can_cut
from ..cache.prefix.selection_key import SelectionKey
from ..events import Progress, PromptLogprobs
from ..prefill_report import Reason
from ..request import GenerationRequest
from ..specprefill.plan import PrefillPlan
from ..specprefill.sparse_prefill import HiddenStates, UpperLayersModel, feed, forward_ends
from .active_request import ActiveRequest, Prefix
from .prefill import Prefiller

READ_ALL = PrefillPlan("full", Reason("other", "read in idle time"), Fraction(1), np.zeros(0, dtype=np.bool_))


def densify(
    prefiller: Prefiller, request: GenerationRequest, selection_key: SelectionKey | None
) -> Generator[Progress | PromptLogprobs, None, tuple[ActiveRequest, mx.array]]:
    """Prefill the prompt into the exact cache. May be interrupted at every chunk; cancelled, it keeps them.

    Args:
        selection_key: the key of the sparse turn with this text.

    Returns:
        The request with its cache, and the logits of the last token, (1, V).
    """
    active = ActiveRequest(-1, request, READ_ALL)
    yield from prefiller.resume(active, again=True)
    yield from _densify_upper_layers(prefiller, active, selection_key)
    logits = yield from prefiller.read_all(active)
    active.store()
    if prefiller.is_stateful:  # the next turn begins with all of it: the sparse turn has a state at its end
        active.keep_prompt(prefiller.caches, len(request.prompt))
    return active, logits


def _densify_upper_layers(
    prefiller: Prefiller, active: ActiveRequest, selection_key: SelectionKey | None
) -> Generator[Progress, None, None]:
    """Run the upper layers over all tokens that the lower layers have read. No-op for turns that are not staged.

    The request's cache and the exact cache then hold the text. If it is cancelled, neither keeps anything.
    """
    model, request, S = prefiller.pair.stages, active.request, active.prefix.length
    if model is None or selection_key is None or not can_cut(active.cache):
        return  # windows and states need checkpoints
    turn = yield from prefiller.caches.target_prefix(request.prompt, request.label, True, selection_key)
    if turn is None or turn.held is None:
        return
    hidden = HiddenStates(S, S, turn.hidden)
    lower = yield from prefiller.caches.draft_prefix(request.prompt[: hidden.end + 1], request.label)
    if lower is None or not hidden.covers(np.arange(S, lower.length, dtype=np.int32)) or lower.length <= S:
        return
    indices = np.arange(S, lower.length, dtype=np.int32)
    _, upper = model.split(active.cache)
    yield Progress("prefill", 0, lower.length - S, cached=S)
    upper_model = UpperLayersModel(model.upper, hidden.of(indices))
    for done, _ in feed(
        upper_model, upper, request.prompt[indices], indices, forward_ends(indices.size, prefiller.step)
    ):
        yield Progress("prefill", done, indices.size)
    active.cache, active.prefix = model.join(lower.cache, upper), Prefix(lower.length)
    active.keep_prompt(prefiller.caches, lower.length)
