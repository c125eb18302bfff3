"""Staged prefill of one request: the target's own first layers read the prompt and score it, the others what is kept.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx

from ..loading import ModelPair
from ..request import Progress
from ..sessions.continuing import Beginning
from ..specprefill.staged_prefill import HiddenStates, prefill_upper
from .sequence import Sequence

__all__ = ["hidden_states", "read_upper"]

_NOT_DRAFTED = "after a staged prefill the target's layers hold different numbers of tokens"


def hidden_states(pair: ModelPair, sequence: Sequence) -> HiddenStates | None:
    """Where the target's own first layers score the prompt: what will keep what they pass on; None elsewhere.

    The paper's rule looks ahead with all layers, and a request that brings its scores needs none.
    """
    assert sequence.plan is not None
    staged = pair.stages is not None and sequence.plan.rule != "paper"
    return HiddenStates(sequence.cached) if staged and sequence.request.specprefill.importance is None else None


def read_upper(
    pair: ModelPair, sequence: Sequence, beginning: Beginning, lower: list[Any], slice_size: Callable[[str], int]
) -> Generator[Progress, None, mx.array]:
    """The kept tokens, in the layers behind those that have read the prompt into the caches `lower`."""
    model, hidden, start = pair.stages, sequence.hidden, beginning.start
    assert model is not None
    assert hidden is not None
    if sequence.speculation is not None and sequence.speculation.strategy is not None:
        sequence.speculation.decline(_NOT_DRAFTED)
    _, upper = model.split(sequence.cache)
    sequence.cache, sequence.staged = model.join(lower, upper), True
    states = hidden.of(beginning.kept)
    mx.eval(states)
    hidden.clear()
    sequence.hidden = None
    prompt, kept = sequence.request.prompt[start:], beginning.kept - start
    logits = yield from prefill_upper(model, upper, prompt, states, kept, lambda: slice_size("prefill"), start)
    sequence.kept = beginning.all_kept
    return logits
