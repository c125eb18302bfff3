"""Samplers with a key of their own, so that a seed means the same text whatever else the process draws."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from .errors import InvalidRequestError
from .request import Logprob, SamplingParams

__all__ = [
    "LogitsProcessor",
    "Sampler",
    "check_sampling",
    "filtered_logits",
    "greedy",
    "held_back",
    "logits_processors",
    "make_sampler",
    "top_logprobs",
]

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

# (field, lowest, highest); OpenAI's ranges where it has one
_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what can't be sampled from.

    Raises:
        InvalidRequestError: names the field.
    """
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}", field=name)
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        raise InvalidRequestError("repetition_penalty must be positive", field="repetition_penalty")
    if params.top_k < 0:
        raise InvalidRequestError("top_k must not be negative (0 turns it off)", field="top_k")
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise InvalidRequestError(f"logit_bias for token {token} is out of range", field="logit_bias")


def greedy(logits: mx.array) -> mx.array:
    """The most likely tokens (B,) of logits (B, V)."""
    return mx.argmax(logits, axis=-1)


def make_sampler(params: SamplingParams, vocab_size: int) -> Sampler:
    """A function from logits (B, V) to tokens (B,).

    Temperature comes first, then top-p, min-p and top-k, as in vLLM and transformers.
    """
    if params.temperature == 0:
        return greedy
    seed = secrets.randbits(63) if params.seed is None else params.seed % 2**63
    key = mx.random.key(seed)
    filtered = filtered_logits(params, vocab_size)

    def sample(logits: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return mx.random.categorical(filtered(logits), axis=-1, key=now)

    return sample


def filtered_logits(params: SamplingParams, vocab_size: int) -> Sampler:
    """The law that `make_sampler` draws from, for temperatures above 0.

    A function from logits (B, V) to unnormalised log-probabilities (B, V) float32; -inf where a filter cuts.
    """
    filters = _filters(params, vocab_size)

    def filtered(logits: mx.array) -> mx.array:
        scaled = logits.astype(mx.float32) * (1.0 / max(params.temperature, 1e-3))
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        for keep_best in filters:
            scaled = keep_best(scaled)
        return scaled

    return filtered


def _filters(params: SamplingParams, vocab_size: int) -> list[Sampler]:
    filters: list[Sampler] = []
    if params.top_p == 0:  # only the most likely token
        return [lambda logprobs: apply_top_k(logprobs, 1)]
    if params.top_p < 1:
        filters.append(lambda logprobs: apply_top_p(logprobs, params.top_p))
    if params.min_p > 0:
        filters.append(lambda logprobs: apply_min_p(logprobs, params.min_p))
    if 0 < params.top_k < vocab_size:
        filters.append(lambda logprobs: apply_top_k(logprobs, params.top_k))
    return filters


def logits_processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Functions of (generated tokens so far, logits (1, V)); penalties look at the generated text only, as OpenAI's."""
    whole = 1 << 30
    processors: list[LogitsProcessor] = make_logits_processors(
        logit_bias=dict(params.logit_bias) or None,
        repetition_penalty=params.repetition_penalty if params.repetition_penalty != 1 else None,
        repetition_context_size=whole,
        presence_penalty=params.presence_penalty or None,
        presence_context_size=whole,
        frequency_penalty=params.frequency_penalty or None,
        frequency_context_size=whole,
    )
    return processors


def held_back(tokens: frozenset[int], until: int) -> LogitsProcessor:
    """Forbids `tokens` (stop ids) before `until` tokens have been generated."""
    ids = mx.array(sorted(tokens), dtype=mx.int32)

    def process(history: mx.array, logits: mx.array) -> mx.array:
        if history.size < until and ids.size:
            logits[:, ids] = -mx.inf
        return logits

    return process


def top_logprobs(logprobs: mx.array, tokens: Sequence[int], count: int) -> list[tuple[Logprob, tuple[Logprob, ...]]]:
    """The chosen tokens' log-probabilities and the `count` best alternatives, per row.

    Args:
        logprobs: (R, V) float32, normalised.
        tokens: R chosen ids.
    """
    table = np.array(logprobs)
    rows = []
    for row, token in zip(table, tokens, strict=True):
        best = np.argpartition(-row, min(count, row.size - 1))[:count] if count else np.zeros(0, dtype=np.int64)
        best = best[np.argsort(-row[best], kind="stable")]
        rows.append((Logprob(token, float(row[token])), tuple(Logprob(int(i), float(row[i])) for i in best)))
    return rows
