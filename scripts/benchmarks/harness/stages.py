"""The engine's stages on their own, to their end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.staged import StagedModel
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.sampling import Sampler
from mlx_specprefill.specprefill.sparse_prefill import prefill
from mlx_specprefill.speculative.row import Limits

from .figures import Clock, timed

__all__ = ["decode", "finish", "full_prefill", "plain_prefill_ms"]

T = TypeVar("T")


def finish(slices: Generator[Any, None, T], after_each: Callable[[Any], None] = lambda _: None) -> T:
    """What the generator returns. `after_each` gets what it yields."""
    while True:
        try:
            after_each(next(slices))
        except StopIteration as done:
            result: T = done.value
            return result


def full_prefill(model: Any, cache: list[Any], prompt: Sequence[int], step: int) -> mx.array:
    """Logits of the last token, (1, V)."""
    return finish(prefill(model, cache, prompt, None, step))


def plain_prefill_ms(model: Any, prompt: Sequence[int], step: int) -> float:
    """Milliseconds of a full prefill on mlx-lm's own cache."""
    return timed(lambda: full_prefill(model, list(make_prompt_cache(model)), prompt, step))[0]


def decode(
    model: Any, cache: list[Any], logits: mx.array, sampler: Sampler, limits: Limits
) -> tuple[list[int], dict[str, float]]:
    """An answer, decoded as the engine decodes a single row, and the time until its last token was read."""
    staged = isinstance(model, StagedModel)
    clock, batch, tokens = Clock(), DecodeBatch(model.whole, model) if staged else DecodeBatch(model), []
    batch.add(DecodeRow(0, cache, logits, sampler, staged=staged))
    while len(tokens) < limits.max_tokens and limits.stop_ids.isdisjoint(tokens[-1:]):
        tokens += [event.token for _, event in batch.step()]
    spent = clock.read()
    mx.synchronize()  # the forward after the last token is queued already
    return tokens, spent
