"""Replays a given continuation after either kind of prefill, to measure quality."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .._steps import Steps
from ..adapters.capture import HeadCapture
from ..adapters.rope import adjusted_offsets
from ..request import GenerationRequest, PrefillReport, Progress, concat_tokens
from .prefill import Prefiller
from .sequence import Sequence

__all__ = ["Replay", "replay_continuation"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Replay:
    """A continuation of T tokens under teacher forcing.

    Attributes:
        logprobs: float32 (T, V), natural logarithm; row t is the distribution from which token t would have been drawn.
        report: of the prefill, with its kept spans.
        attention: float32 (M,) over the prompt's tokens, the mean over all query rows but the first, layers that see
            the whole prompt and heads; None unless asked for, or where no layer sees all of it.
    """

    logprobs: Floats
    report: PrefillReport
    attention: Floats | None


def replay_continuation(
    prefiller: Prefiller, request: GenerationRequest, continuation: tuple[int, ...], attention: bool, keep: bool = False
) -> Generator[Progress, None, Replay]:
    """Prefill, then run one target forward over the whole continuation. Yields between prefill chunks.

    Attention can be read only after a full prefill: the target's cache must hold the whole prompt.
    """
    sequence = Sequence(-1, request, 0.0, plan=prefiller.planner.plan(request))
    steps = Steps(prefiller.run(sequence))
    for event in steps:
        assert isinstance(event, Progress)
        yield event
    logits = steps.result
    sequence.store()
    M, T = len(request.prompt), len(continuation) - 1
    capture = HeadCapture(M, None) if attention and sequence.kept is None and T > 0 else None
    if T > 0:
        seen = nullcontext() if capture is None else capture.of_passage(M + T, T, slice(0, T))
        with adjusted_offsets([sequence.shift]), seen:
            rows = sequence.model(prefiller.pair)(mx.array(continuation[:-1])[None], cache=sequence.cache)[0]
        logits = mx.concatenate([logits, rows])
    if keep and sequence.shift == 0:
        sequence.keep(prefiller.caches, concat_tokens(request.prompt, continuation[:-1]), sequence.cache)
    raw = logits.astype(mx.float32)
    logprobs = np.array(raw - mx.logsumexp(raw, axis=-1, keepdims=True))
    looked = np.array(mx.stack(list(capture.found.values())).mean(axis=0)) if capture and capture.found else None
    return Replay(logprobs, sequence.report(), looked)
