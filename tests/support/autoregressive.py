"""Decoding without batches: one sequence, one token per forward. What the engine's batches are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_specprefill.adapters.rotation import adjust_offsets
from mlx_specprefill.choosing.sampling import LogitsProcessor, Sampler, choose, token_event
from mlx_specprefill.events import TokenEvent

__all__ = ["decode"]


def decode(
    model: nn.Module,
    cache: list[Any],
    logits: mx.array,
    sampler: Sampler,
    processors: list[LogitsProcessor],
    max_tokens: int,
    logprobs: int | None = None,
    shift: int = 0,
) -> Iterator[TokenEvent]:
    """Generate up to `max_tokens` tokens.

    Args:
        cache: holds the prefilled prompt; advances with every token but the last.
        logits: of the last prompt token, (1, V).
        logprobs: None, or how many alternatives to report per token.
        shift: positions minus slots for caches that can't carry it; 0 for positioned ones.
    """
    history: mx.array | None = None
    token, scores = choose(logits, history, sampler, processors)
    _queue(token, scores, logprobs)
    for count in range(1, max_tokens + 1):
        if count < max_tokens:
            if processors:
                history = token if history is None else mx.concatenate([history, token])
            with adjust_offsets([shift]):
                upcoming = model(token[None], cache=cache)[:, -1, :]
            following, following_scores = choose(upcoming, history, sampler, processors)
            _queue(following, following_scores, logprobs)
        yield token_event(int(np.array(token)[0]), scores, logprobs)
        if count < max_tokens:
            token, scores = following, following_scores


def _queue(token: mx.array, scores: mx.array, logprobs: int | None) -> None:
    """Scores too if they are read: later they would wait for the forward after this one."""
    mx.async_eval(token, *([] if logprobs is None else [scores]))
