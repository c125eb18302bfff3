"""The MTP head against a reimplementation in float64 that looks at its whole text for every entry."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_specprefill.adapters.mtp import MTPHead
from mlx_specprefill.cache.positioned import PositionedKVCache, place
from tests.support.oracle import build
from tests.support.precision import assert_close
from tests.support.tiny import VOCAB, random_prompt, tiny_head, tiny_model

Floats = npt.NDArray[np.float64]


def to_numpy(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32), dtype=np.float64)


def rms(x: Floats, norm: Any) -> Floats:
    scaled: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * to_numpy(norm.weight)
    return scaled


def sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-x))
    return result


def linear(x: Floats, module: Any) -> Floats:
    product: Floats = x @ to_numpy(module.weight).T
    return product


class Plain:
    """One head, entry by entry, from the formulas: gated attention with partial RoPE, and a gated feed-forward."""

    def __init__(self, head: MTPHead) -> None:
        self.layers = head.layers
        self.text = head._text
        self.args = self.text.args

    def rotated(self, x: Floats, position: int) -> Floats:
        """x (H, D): the first part of each head in pairs of halves."""
        dims = int(self.args.head_dim * self.args.partial_rotary_factor)
        angles = position * self.args.rope_theta ** (-np.arange(0, dims, 2) / dims)
        a, b, rest = x[:, : dims // 2], x[:, dims // 2 : dims], x[:, dims:]
        turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles), rest]
        return np.concatenate(turned, axis=-1)

    def joined(self, hidden: Floats, token: int) -> Floats:
        embedding = to_numpy(self.text.model.embed_tokens.weight)[token]
        parts = [rms(embedding, self.layers.pre_fc_norm_embedding), rms(hidden, self.layers.pre_fc_norm_hidden)]
        return linear(np.concatenate(parts), self.layers.fc)

    def out(self, hidden: Floats, following: list[int], positions: list[int]) -> Floats:
        """The last entry's output; all entries are computed again."""
        layer, attention = self.layers.layers[0], self.layers.layers[0].self_attn
        xs = [self.joined(h, token) for h, token in zip(hidden, following, strict=True)]
        normed = [rms(x, layer.input_layernorm) for x in xs]
        kv, heads = self.args.num_key_value_heads, self.args.num_attention_heads
        keys = [
            self.rotated(rms(linear(x, attention.k_proj).reshape(kv, -1), attention.k_norm), p)
            for x, p in zip(normed, positions, strict=True)
        ]
        values = [linear(x, attention.v_proj).reshape(kv, -1) for x in normed]
        both = linear(normed[-1], attention.q_proj).reshape(heads, -1)
        query, gate = np.split(both, 2, axis=-1)
        query = self.rotated(rms(query, attention.q_norm), positions[-1])
        looked = []
        for head in range(heads):
            group = head * kv // heads
            logits = np.array([query[head] @ key[group] for key in keys]) * self.args.head_dim**-0.5
            weights = np.exp(logits - logits.max())
            looked.append(sum(w * v[group] for w, v in zip(weights / weights.sum(), values, strict=True)))
        x = xs[-1] + linear(np.concatenate(looked) * sigmoid(gate.reshape(-1)), attention.o_proj)
        inner = rms(x, layer.post_attention_layernorm)
        gated = linear(inner, layer.mlp.gate_proj)
        x = x + linear(gated * sigmoid(gated) * linear(inner, layer.mlp.up_proj), layer.mlp.down_proj)
        return rms(x, self.layers.norm)

    def logits(self, out: Floats) -> Floats:
        if self.args.tie_word_embeddings:
            return linear(out, self.text.model.embed_tokens)
        return linear(out, self.text.lm_head)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", [list(range(12)), [0, 1, 2, 9, 10, 23, 24, 25, 40, 41, 58, 77]])
def test_logits_are_those_of_the_formulas(positions: list[int], tied: bool) -> None:
    """In chunks with a cache, at contiguous positions and with gaps, then on its own output."""
    model = tiny_model("qwen3_5", 3)
    if tied:
        model.language_model.args.tie_word_embeddings = True
    head = tiny_head(model)
    tokens = list(random_prompt(13, 4))
    _, hidden = head.run_target(mx.array([tokens[:12]]), make_prompt_cache(model))
    cache, plain = PositionedKVCache(), Plain(head)
    for start, end in ((0, 5), (5, 6), (6, 12)):
        place([cache], np.array(positions[start:end], dtype=np.int32))
        out = head(hidden[:, start:end], mx.array([tokens[start + 1 : end + 1]]), cache)
        expected = plain.out(to_numpy(hidden[0, :end]), tokens[1 : end + 1], positions[:end])
        assert_close(to_numpy(out[0, -1]), expected, rtol=1e-3, atol=1e-4)
        assert_close(to_numpy(head.logits(out)[0, -1]), plain.logits(expected), rtol=1e-3, atol=1e-4)
    further = head(out[:, -1:], mx.array([[7]]), cache)
    rows = np.concatenate([to_numpy(hidden[0]), to_numpy(out[0, -1:])])
    expected = plain.out(rows, [*tokens[1:], 7], [*positions, positions[-1] + 1])
    assert_close(to_numpy(further[0, -1]), expected, rtol=1e-3, atol=1e-4)


def test_the_hidden_state_is_what_the_output_projection_reads() -> None:
    model = tiny_model("qwen3_5", 3)
    head = tiny_head(model)
    text = mx.array([[3, 4, 5]])
    logits, hidden = head.run_target(text, make_prompt_cache(model))
    assert_close(logits, model(text), atol=1e-5, rtol=1e-5)
    assert_close(head.logits(hidden), logits, atol=1e-5, rtol=1e-5)


def test_a_head_with_experts() -> None:
    model = build("qwen3_5_moe")
    head = tiny_head(model)
    assert hasattr(head.layers.layers[0].mlp, "switch_mlp")
    out = head(mx.ones((1, 3, head.layers.norm.weight.size)), mx.array([[1, 2, 3]]), KVCache())
    assert head.logits(out).shape == (1, 3, model.language_model.args.vocab_size)
    assert head.layers.norm.weight.size != VOCAB
