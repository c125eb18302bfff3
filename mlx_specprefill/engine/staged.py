"""Staged prefill of one request: the target's own first layers read the prompt and score it, the others what is kept.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from .._steps import Steps
from ..adapters.staged import StagedModel
from ..loading import ModelPair
from ..request import Progress
from ..sessions.continuing import Beginning
from ..sessions.repair import insert
from ..sessions.splice import can_splice
from ..specprefill.staged_prefill import HiddenStates, Reading, prefill_upper
from .caches import EngineCaches
from .sequence import Sequence

__all__ = ["hidden_states", "read_rest", "read_upper"]


def hidden_states(pair: ModelPair, caches: EngineCaches, sequence: Sequence) -> HiddenStates | None:
    """Where the target's own first layers score the prompt: what will keep what they pass on; None elsewhere.

    The paper's rule looks ahead with all layers, and a request that brings its scores needs none. What the other layers
    hold of a dense prefix is not kept, and what an earlier turn has left need not be read for it.
    """
    plan, request = sequence.plan, sequence.request
    assert plan is not None
    if pair.stages is None or plan.rule == "paper" or request.specprefill.importance is not None:
        return None
    earlier = request.prompt[: request.usable_prefix]
    S = sequence.cached
    return HiddenStates(S, max(S, caches.session_length(earlier, plan.choice, request.label)))


def read_upper(
    pair: ModelPair,
    caches: EngineCaches,
    sequence: Sequence,
    beginning: Beginning,
    lower: list[Any],
    slice_size: Callable[[str], int],
) -> Generator[Progress, None, mx.array]:
    """What is missing and what is kept, in the layers behind those that have read the prompt into the caches `lower`.

    Args:
        beginning: its `cache`, of an earlier turn, is that of these layers alone.
    """
    model, hidden = pair.stages, sequence.hidden
    assert model is not None
    assert hidden is not None
    dense, upper = model.split(sequence.cache)
    upper = upper if beginning.cache is None else beginning.cache
    if not (hidden.covers(beginning.missing) and hidden.covers(beginning.kept)):
        yield from _read_again(model, sequence, dense, lambda: slice_size("draft"))
    sequence.cache, sequence.staged = model.join(lower, upper), True
    missing, kept = (hidden.of(indices) for indices in (beginning.missing, beginning.kept))
    mx.eval(missing, kept)
    if not caches.enabled:  # else the next turn may want what this one drops
        hidden.clear()
    return (yield from _go_on(model, sequence, beginning, (missing, kept), lambda: slice_size("prefill")))


def _read_again(
    model: StagedModel, sequence: Sequence, dense: list[Any], step: Callable[[], int]
) -> Generator[Progress, None, None]:
    """What the other layers want and nobody has kept: the earlier turn was another kind of prefill.

    Args:
        dense: caches of the first layers, which hold the dense prefix.
    """
    hidden, prompt = sequence.hidden, sequence.request.prompt
    assert hidden is not None
    again, start, stop = HiddenStates(sequence.cached), sequence.cached, hidden.begin
    while start < stop:
        end = min(start + step(), stop)
        again.keep(start, model.lower(mx.array(prompt[start:end])[None], cache=dense))
        mx.eval([part.state for part in dense])
        yield Progress("draft", len(prompt), len(prompt))
        start = end
    hidden.put_before(again)


def read_rest(
    pair: ModelPair, caches: EngineCaches, sequence: Sequence, choice: str, slice_size: Callable[[str], int]
) -> Generator[Progress, None, None]:
    """Of a staged turn's text, what its first layers have read: densely, in the others alone. Nothing elsewhere.

    The sequence's cache then holds it, and the exact cache too. Cancelled, nothing is kept.
    """
    model, request, S = pair.stages, sequence.request, sequence.cached
    if model is None or not can_splice(sequence.cache):  # windows and recurrent states have checkpoints to make
        return
    session = caches.session(request.prompt, choice, request.label, staged=True)
    lower = caches.draft_prefix(request.prompt, request.label)
    if session is None or session.hidden is None or lower is None:
        return
    indices = np.arange(S, lower.length, dtype=np.int32)
    if not indices.size or not session.hidden.covers(indices):
        return
    _, upper = model.split(sequence.cache)
    text, states = request.prompt[S : lower.length], session.hidden.of(indices)
    yield from prefill_upper(model, upper, text, states, indices - S, lambda: slice_size("prefill"), S)
    sequence.cache, sequence.cached = model.join(lower.cache, upper), lower.length
    caches.keep_target(request.prompt[: lower.length], sequence.cache, request)


def _go_on(
    model: StagedModel,
    sequence: Sequence,
    beginning: Beginning,
    hidden: tuple[mx.array, mx.array],
    step: Callable[[], int],
) -> Generator[Progress, None, mx.array]:
    """Progress counts what is missing and what follows.

    Args:
        hidden: of both.
    """
    _, upper = model.split(sequence.cache)
    prompt, start, size = sequence.request.prompt, beginning.start, int(beginning.missing.size)
    if size:
        for progress in insert(Reading(model.upper, hidden[0]), upper, prompt, beginning.missing, step):
            yield replace(progress, total=beginning.read)
    kept = Steps(prefill_upper(model, upper, prompt[start:], hidden[1], beginning.kept - start, step, start))
    for progress in kept:
        yield replace(progress, done=size + progress.done, total=beginning.read)
    sequence.kept = beginning.all_kept
    return kept.result
