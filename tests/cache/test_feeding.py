"""Prefill through one code path: full, sparse, and what must hold between them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import SparseUnsupportedError
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache, quantize_kv
from tests.support.autoregressive import decode
from tests.support.precision import assert_close, near_ties, numbers
from tests.support.rows import next_position, shift_of
from tests.support.steps import finish, prefill
from tests.support.tiny import FAMILIES, random_prompt, tiny_model

M = 100
KEPT = np.r_[0:20, 33:41, 60:70, 90:100].astype(np.int32)


def answer(model, cache, logits, count=8, shift=0):
    greedy_sampler = lambda scores: mx.argmax(scores, axis=-1)  # noqa: E731
    return [e.token for e in decode(model, cache, logits, greedy_sampler, [], count, shift=shift)]


def arrays(cache):
    """Every array that a cache holds, in order, cut to what is stored."""
    found = []
    for part in leaves(cache):
        inner = getattr(part, "inner", part)
        content = inner.cache if hasattr(inner, "cache") else inner.keys_and_values()
        found += [numbers(a) for a in content if a is not None]
    return found


@pytest.mark.parametrize(
    ("tokens", "fed"), [(1, [1]), (33, [33]), (64, [64]), (65, [32, 33, 65]), (100, [32, 64, 68, 100])]
)
def test_little_is_fed_in_one_forward(tokens, fed):
    model = tiny_model("llama")
    slices = prefill(model, make_prompt_cache(model), random_prompt(tokens), None, 32)
    assert list(slices) == fed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fully_kept_prefix_is_dense_exact(family):
    """P9: KV and recurrent state after [0, p) are those of the dense run, bit for bit."""
    model, prompt, p = tiny_model(family), random_prompt(M), 20
    dense, sparse = make_prompt_cache(model), make_positioned_cache(model)
    model(mx.array(prompt[:p])[None], cache=dense)
    generator = prefill(model, sparse, prompt, KEPT, p, cuts=(p,))
    next(generator)
    for ours, theirs in zip(arrays(sparse), arrays(dense), strict=True):
        assert (ours == theirs).all()
    generator.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_goes_on_at_the_end_of_the_prompt(family):
    """P5: the next token's position is M although the cache holds fewer tokens."""
    model, prompt = tiny_model(family), random_prompt(M)
    cache = make_positioned_cache(model)
    logits = finish(prefill(model, cache, prompt, KEPT, 16))
    assert (next_position(cache), shift_of(cache)) == (M, M - KEPT.size)
    answer(model, cache, logits, 5)
    assert (next_position(cache), shift_of(cache)) == (M + 4, M - KEPT.size)


def test_after_a_prefix_of_S_tokens_positions_go_on_from_there():
    """Prefix of S, sparse suffix: equals keeping the whole prefix and the same suffix tokens in one go."""
    model, prompt, S = tiny_model("llama"), random_prompt(M), 40
    kept = np.r_[3:9, 30:40, 50:60].astype(np.int32)
    cache = make_positioned_cache(model)
    finish(prefill(model, cache, prompt[:S], np.arange(S, dtype=np.int32), 64))
    logits = finish(prefill(model, cache, prompt[S:], kept, 64, offset=S))
    once = make_positioned_cache(model)
    expected = finish(prefill(model, once, prompt, np.r_[0:S, kept + S].astype(np.int32), 64))
    assert_close(logits, expected, atol=1e-5)
    assert next_position(cache) == M


@pytest.mark.parametrize("family", [pytest.param("llama", marks=near_ties()), "qwen3"])
def test_a_quantised_cache_decodes_at_the_adjusted_offset(family):
    """The stock quantised cache counts slots only; without the adjustment the positions would restart at N."""
    model, prompt = tiny_model(family, head_dim=64, hidden_size=64), random_prompt(M)
    positioned = make_positioned_cache(model)
    logits = finish(prefill(model, positioned, prompt, KEPT, 32))
    cache, shift = quantize_kv(positioned, 8)
    assert shift == M - KEPT.size
    expected = answer(model, positioned, logits)
    assert answer(model, cache, logits, shift=shift) == expected


def test_a_cache_without_positions_is_refused():
    model = tiny_model("llama")
    with pytest.raises(SparseUnsupportedError, match="no layer of the cache"):
        finish(prefill(model, make_prompt_cache(model), random_prompt(M), KEPT, 32))
