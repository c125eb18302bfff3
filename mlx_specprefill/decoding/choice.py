"""From logits to a token and to what is reported about it; the same for a row alone and in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..request import TokenEvent
from ..sampling import LogitsProcessor, Sampler, top_logprobs

__all__ = ["choose", "token_event"]


def choose(
    logits: mx.array,
    history: mx.array | None,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor],
    allowed: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The next tokens (B,), and the log-probabilities (B, V) of the model itself, before penalties and temperature.

    Args:
        logits: (B, V); one row if there are processors.
        history: the row's generated tokens so far, or None.
        allowed: (B, V) bool, or None for all tokens; applied before anything else.
    """
    raw = logits.astype(mx.float32)
    scores = raw - mx.logsumexp(raw, axis=-1, keepdims=True)
    adjusted = mx.array(raw) if allowed is None else mx.where(allowed, raw, -mx.inf)  # processors write in place
    for process in processors:
        adjusted = process(mx.array([], dtype=mx.int32) if history is None else history, adjusted)
    return sampler(adjusted), scores


def token_event(token: int, scores: mx.array, logprobs: int | None) -> TokenEvent:
    """The event of one row's token; scores (1, V), read only if `logprobs` asks for them."""
    if logprobs is None:
        return TokenEvent(token)
    ((own, best),) = top_logprobs(scores, [token], logprobs)
    return TokenEvent(token, own.logprob, best)
