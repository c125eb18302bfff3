"""Every sampler against its definition, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..request import SamplingParams
from ..sampling import choose, logits_processors, make_sampler
from ..speculative.token_sampler import TokenSampler
from .cases import VOCAB, Dtype, Floats, floats

__all__ = ["sampler_errors"]

_TEMPERATURE = 0.8
_SEEN = [3, 5, 3, 9]  # the answer so far
_DRAWS = 20_000


def sampler_errors(dtype: Dtype) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield operations, limits of their errors, and functions that measure the errors, as total variations."""
    logits = (3 * mx.random.normal((1, VOCAB), key=mx.random.key(3))).astype(getattr(mx, dtype))
    for name, (params, truth) in _definitions(floats(logits)[0].astype(np.float64)).items():
        yield name, 1e-4, partial(_computed, logits, params, truth)
        if name == "temperature":
            yield "drawn tokens", 0.05, partial(_drawn, logits, params, truth)


def _computed(logits: mx.array, params: SamplingParams, truth: Floats) -> float:
    """Return the error of the distribution that a request's tokens are drawn from."""
    (row,) = TokenSampler(params, VOCAB, logits_processors(params)).distributions(logits, _SEEN)
    return float(np.abs(np.asarray(row) - truth).sum() / 2)


def _drawn(logits: mx.array, params: SamplingParams, truth: Floats) -> float:
    """Return the error of 20 000 drawn tokens; chance makes some .01."""
    tokens, _ = choose(mx.repeat(logits, _DRAWS, axis=0), None, make_sampler(params, VOCAB), [])
    return float(np.abs(np.bincount(np.array(tokens), minlength=VOCAB) / _DRAWS - truth).sum() / 2)


def _definitions(logits: Floats) -> dict[str, tuple[SamplingParams, Floats]]:
    """Return each sampler's parameters and distribution (V,)."""

    def changed(tokens: Any, values: Any) -> Floats:
        given = logits.copy()
        given[tokens] = values
        weights: Floats = np.exp((given - given.max()) / _TEMPERATURE)
        return weights / np.sum(weights)

    def only(tokens: Any) -> Floats:
        kept = np.zeros_like(probs)
        kept[tokens] = probs[tokens]
        return kept / np.sum(kept)

    def first(mass: float, order: Any) -> Floats:
        return only(order[np.cumsum(probs[order]) - probs[order] < mass])

    probs = changed([], [])
    order, surprise = np.argsort(-probs), -np.log(probs)
    best, frequent = int(order[0]), order[: int((probs > 0.1).sum()) - 1]
    seen, counts = np.unique(_SEEN, return_counts=True)
    own = logits[seen]
    made: dict[str, tuple[dict[str, Any], Floats]] = {
        "temperature": ({}, probs),
        "top-p": ({"top_p": 0.7}, first(0.7, order)),
        "top-k": ({"top_k": 5}, only(order[:5])),
        "min-p": ({"min_p": 0.2}, only(probs >= 0.2 * probs[best])),
        "typical-p": ({"typical_p": 0.6}, first(0.6, np.argsort(np.abs(surprise - probs @ surprise)))),
        "XTC": (
            {"xtc_probability": 0.5, "xtc_threshold": 0.1},
            (probs + only(np.setdiff1d(order, frequent))) / 2,
        ),
        "repetition penalty": ({"repetition_penalty": 1.5}, changed(seen, np.where(own < 0, own * 1.5, own / 1.5))),
        "presence penalty": ({"presence_penalty": 1.5}, changed(seen, own - 1.5)),
        "frequency penalty": ({"frequency_penalty": 1.5}, changed(seen, own - 1.5 * counts)),
        "logit bias": ({"logit_bias": {4: 5.0}}, changed(4, logits[4] + 5)),
        "bad words": ({"bad_words": ((3, 9, best), (4, 5))}, changed(best, -np.inf)),
        "allowed tokens": ({"allowed_token_ids": frozenset(range(40))}, only(np.arange(40))),
    }
    base = SamplingParams(temperature=_TEMPERATURE, seed=4)
    return {name: (replace(base, **given), defined) for name, (given, defined) in made.items()}
