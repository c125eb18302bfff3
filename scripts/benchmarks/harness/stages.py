"""The engine's stages, run one by one to their end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.cache.feeding import feed, forward_ends
from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow

from .figures import timed

T = TypeVar("T")


def finish(slices: Generator[Any, None, T], after_each: Callable[[Any], None] = lambda _: None) -> T:
    """Run a generator and return its value. `after_each` gets every value that it yields."""
    while True:
        try:
            after_each(next(slices))
        except StopIteration as done:
            result: T = done.value
            return result


def full_prefill(model: Any, cache: list[Any], prompt: Sequence[int], step: int) -> mx.array:
    """Return the logits of the last token, (1, V)."""
    return prefill(model, cache, prompt, None, step)


def prefill(model: Any, cache: list[Any], prompt: Sequence[int], kept: np.ndarray | None, step: int) -> mx.array:
    """Return the logits of the last token, (1, V), after the kept ones (N,); None: after all."""
    ids = np.asarray(prompt, dtype=np.int32)
    tokens = ids if kept is None else ids[kept]
    *_, (_, logits) = feed(model, cache, tokens, kept, forward_ends(tokens.size, lambda: step), logits=True)
    assert logits is not None
    return logits


def plain_prefill_ms(model: Any, prompt: Sequence[int], step: int, reader: Any = None) -> float:
    """Return the milliseconds of a full prefill on mlx-lm's own cache.

    Args:
        reader: called in the model's place; None: the model itself.
    """
    return timed(
        lambda: full_prefill(model if reader is None else reader, list(make_prompt_cache(model)), prompt, step)
    )[0]


def decode_ms(model: Any, cache: list[Any], logits: mx.array, count: int) -> float:
    """Return the milliseconds per token of an answer, decoded as the engine decodes a single row."""
    batch = DecodeBatch(model)
    batch.add(DecodeRow(0, cache, logits, greedy))
    ms, _ = timed(lambda: [batch.step() for _ in range(count)])
    mx.synchronize()  # the forward after the last token is queued already
    return ms / count
