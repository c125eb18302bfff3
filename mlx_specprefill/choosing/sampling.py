"""Chooses tokens from logits: temperature, filters, penalties, biases, seeds, log-probabilities.

Every sampler has its own key: a seed gives the same text beside any other request.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors
from pydantic import TypeAdapter, ValidationError

from ..errors import InvalidRequestError
from ..events import Logprob, TokenEvent
from ..request import GenerationRequest, SamplingParams

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_RANGES = TypeAdapter(SamplingParams)
# A smaller share is 0 in float32, and would exclude even the likeliest token.
_LEAST_SHARE = 1e-9
# Tokens of a forward whose logits are all read: each row has the size of the vocabulary.
LOGITS_ROWS = 128


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Check the sampling parameters.

    Raises:
        InvalidRequestError: names the field.
    """
    try:
        _RANGES.validate_python(asdict(params))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InvalidRequestError(f"{name}: {first['msg']} (got {first['input']})", field=name) from error
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocab_size or not math.isfinite(bias):
            raise InvalidRequestError(f"logit_bias for token {token} is out of range", field="logit_bias")


def greedy(logits: mx.array) -> mx.array:
    """Return the most likely tokens (B,) of logits (B, V)."""
    return mx.argmax(logits, axis=-1)


def make_sampler(params: SamplingParams, vocab_size: int) -> Sampler:
    """Return a function from logits (B, V) to tokens (B,).

    Temperature comes first, then top-p, min-p and top-k.
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
    """Return the distribution that `make_sampler` draws from, for temperatures above 0.

    A function from logits (B, V) to unnormalised log-probabilities (B, V) float32; -inf where a filter cuts.
    """
    filters = _filters(params, vocab_size)

    def filtered(logits: mx.array) -> mx.array:
        raw = logits.astype(mx.float32)
        scaled = (raw - raw.max(axis=-1, keepdims=True)) * (1.0 / max(params.temperature, 1e-3))
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
        filters.append(lambda logprobs: apply_top_p(logprobs, max(params.top_p, _LEAST_SHARE)))
    if params.min_p > 0:
        filters.append(lambda logprobs: apply_min_p(logprobs, params.min_p))
    if 0 < params.top_k < vocab_size:
        filters.append(lambda logprobs: apply_top_k(logprobs, params.top_k))
    return filters


def logits_processors(params: SamplingParams) -> list[LogitsProcessor]:
    """Return functions of (generated tokens so far, logits (1, V)). Penalties count generated text, as OpenAI's."""
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


def processors_of(request: GenerationRequest) -> list[LogitsProcessor]:
    """Return a request's penalties, biases and least length. A constraint handles `min_tokens` itself."""
    processors = logits_processors(request.sampling)
    if request.min_tokens and request.constraint is None:
        processors.append(forbid_until(request.stop_token_ids, request.min_tokens))
    return processors


def forbid_until(tokens: frozenset[int], until: int) -> LogitsProcessor:
    """Forbid `tokens` (stop ids) before `until` tokens have been generated, unless they are all that is left."""
    ids = mx.array(sorted(tokens), dtype=mx.int32)

    def process(history: mx.array, logits: mx.array) -> mx.array:
        if history.size >= until or not ids.size:
            return logits
        cut = mx.where(mx.zeros(logits.shape[-1], mx.bool_).at[ids].maximum(True), -mx.inf, logits)
        return mx.where((cut > -mx.inf).any(axis=-1, keepdims=True), cut, logits)

    return process


def top_logprobs(logprobs: mx.array, tokens: Sequence[int], count: int) -> list[tuple[Logprob, tuple[Logprob, ...]]]:
    """Return the chosen tokens' log-probabilities and the `count` best alternatives, per row.

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


# --- from logits to a token and its report; the same for a row alone and in a batch -----------------------------------


def log_softmax(logits: mx.array) -> mx.array:
    """Return the log-probabilities of logits (R, V), as float32."""
    raw = logits.astype(mx.float32)
    return raw - mx.logsumexp(raw, axis=-1, keepdims=True)


def choose(
    logits: mx.array,
    history: mx.array | None,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor],
    allowed: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Return the next tokens (B,), and the model's log-probabilities (B, V) before penalties and temperature.

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
    """Return the event of one row's token. Reads scores (1, V) only if `logprobs` is set."""
    if logprobs is None:
        return TokenEvent(token)
    ((own, best),) = top_logprobs(scores, [token], logprobs)
    return TokenEvent(token, own.logprob, best)
