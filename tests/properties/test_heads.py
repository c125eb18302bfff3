"""Every head of every architecture whose attention can be read, against what attention itself was called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.capture import HeadCapture
from tests.support import oracle
from tests.support.oracle import build, captured_layers, make_case, tiny_models
from tests.support.refusals import DRAFT_REFUSALS

DRAFTS = [name for name, tiny in tiny_models().items() if tiny.architecture not in DRAFT_REFUSALS]
M, CUTS, PASSAGE = 50, (23, 29), (33, 41)  # windows are 20 tokens
Rows = npt.NDArray[np.float64]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@contextmanager
def recorded(length: int) -> Iterator[list[Rows]]:
    """Attention (H, length, S) of each call of forwards of so many tokens, from its own arguments, in float64."""
    found: list[Rows] = []
    attention, softmax = mx.fast.scaled_dot_product_attention, mx.softmax

    def attending(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        found.append(_weights(q, k, kwargs["scale"], kwargs.get("mask"), kwargs.get("sinks")))
        return attention(q, k, v, **kwargs)

    def normalising(logits: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if logits.ndim >= 4 and logits.shape[-2] == length:
            found.append(_shares(_array(logits).reshape(-1, *logits.shape[-2:]), None))
        return softmax(logits, *args, **kwargs)

    mx.fast.scaled_dot_product_attention, mx.softmax = attending, normalising
    try:
        yield found
    finally:
        mx.fast.scaled_dot_product_attention, mx.softmax = attention, softmax


def _weights(q: mx.array, k: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> Rows:
    queries, keys = _array(q)[0], np.repeat(_array(k)[0], q.shape[1] // k.shape[1], axis=0)
    logits = scale * np.einsum("hld,hsd->hls", queries, keys)
    L, S = logits.shape[-2:]
    if isinstance(mask, mx.array):
        given = np.array(mask) if mask.dtype == mx.bool_ else _array(mask)
        given = np.broadcast_to(given, (1, queries.shape[0], L, S))[0]
        logits = np.where(given, logits, -np.inf) if given.dtype == np.bool_ else logits + given
    elif L > 1:
        logits = np.where(np.tri(L, S, S - L, dtype=np.bool_), logits, -np.inf)
    return _shares(logits, sinks)


def _shares(logits: Rows, sinks: mx.array | None) -> Rows:
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total = shares.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(_array(sinks)[:, None, None] - logits.max(axis=-1, keepdims=True))
    return shares / total


def _array(value: mx.array) -> Rows:
    return np.array(value.astype(mx.float32)).astype(np.float64)


def read(model: nn.Module, tokens: mx.array, capture: HeadCapture) -> list[Rows]:
    """The prompt in slices; what attention does in the one that the passage lies in."""
    cache, found = make_prompt_cache(model), list[Rows]()
    for start, stop in ((0, CUTS[0]), CUTS, (CUTS[1], M)):
        if start <= PASSAGE[0] < stop:
            place = slice(PASSAGE[0] - start, PASSAGE[1] - start)
            with capture.of_passage(stop, stop - start, place), recorded(stop - start) as found:
                model(tokens[:, start:stop], cache=cache)
        else:
            model(tokens[:, start:stop], cache=cache)
        mx.eval([part.state for part in cache])
    return found


@pytest.mark.parametrize("name", DRAFTS)
def test_heads_are_those_that_attention_computes(name: str) -> None:
    """Their numbers too, also where some calls see a window only and are not read."""
    model = build(name)
    tokens = mx.array(make_case(oracle.vocabulary(model), length=M).prompt)[None]
    capture = HeadCapture(M, None)
    truth = read(model, tokens, capture)
    whole = {call: rows for call, rows in enumerate(truth) if rows.shape[-1] == M}
    assert capture.calls == len(truth)
    assert set(capture.attention) == {(call, head) for call, rows in whole.items() for head in range(len(rows))}
    place = slice(PASSAGE[0] - CUTS[1], PASSAGE[1] - CUTS[1])
    for (call, head), row in capture.attention.items():
        expected = whole[call][head, place].mean(axis=0)
        np.testing.assert_allclose(np.array(row), expected, rtol=1e-3, atol=1e-6)
    assert len(whole) >= captured_layers(model, np.array(tokens[0])) > 0
