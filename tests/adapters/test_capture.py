"""Captured rows equal attention recomputed by hand in float64, for each way that models compute it."""

from __future__ import annotations

import copy
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from mlx_specprefill.adapters.capture import HeadCapture, QueryCapture, pool
from tests.support.oracle import tiny_models

Rows = npt.NDArray[np.float64]
M, LOOK_AHEAD = 41, 3
TOKENS = [(5 * i + 2) % 97 for i in range(M + LOOK_AHEAD)]


def tiny(name: str, **changes: Any) -> nn.Module:
    """A tiny model whose attention is far from uniform: q and k projections and norms are scaled up."""
    entry = tiny_models()[name]
    config = copy.deepcopy(entry.config)
    config.get("text_config", config).update(changes)
    module = importlib.import_module(f"mlx_lm.models.{entry.architecture}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))

    def sharpen(path: str, value: mx.array) -> mx.array:
        if "norm" in path:
            return value + 0.3 * mx.random.normal(value.shape)
        if "sinks" in path:
            return mx.random.normal(value.shape)
        return 4 * value if any(part in path for part in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj")) else value

    model.update(tree_map_with_path(sharpen, model.parameters()))
    mx.eval(model.parameters())
    return model


# --- attention by hand -----------------------------------------------------------------------------------------------


def array(value: mx.array) -> Rows:
    return np.array(value.astype(mx.float32)).astype(np.float64)


def linear(layer: nn.Linear, x: Rows) -> Rows:
    bias = array(layer.bias) if "bias" in layer else 0.0
    return x @ array(layer.weight).T + bias


def rms_norm(x: Rows, layer: nn.RMSNorm) -> Rows:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + layer.eps) * array(layer.weight)


def rotate(x: Rows, positions: Rows, base: float, dims: int, interleaved: bool = False) -> Rows:
    """x (H, L, D); the first `dims` features turn, the others stay."""
    angles = positions[:, None] * base ** (-np.arange(0, dims, 2) / dims)[None]
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2)) if interleaved else (slice(dims // 2), slice(dims // 2, dims))
    )
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def heads(x: Rows, count: int) -> Rows:
    """(L, H * D) -> (H, L, D)."""
    return x.reshape(len(x), count, -1).transpose(1, 0, 2)


def softmax(logits: Rows, sinks: Rows | None = None) -> Rows:
    """(H, M); a sink takes its share of every row."""
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    total = shares.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - logits.max(-1, keepdims=True))
    return shares / total


def grouped_logits(q: Rows, k: Rows, scale: float) -> Rows:
    """The last query against the prompt's keys: q (H, L, D), k (H_kv, L, D) -> (H, M)."""
    k = np.repeat(k, len(q) // len(k), axis=0)
    return scale * np.einsum("hd,hsd->hs", q[:, -1], k[:, :M])


def llama_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    q, k = heads(linear(layer.q_proj, x), layer.n_heads), heads(linear(layer.k_proj, x), layer.n_kv_heads)
    if "q_norm" in layer:
        q, k = rms_norm(q, layer.q_norm), rms_norm(k, layer.k_norm)
    positions = np.arange(len(x), dtype=np.float64)
    dims = q.shape[-1]
    q, k = (rotate(part, positions, config["rope_theta"], dims) for part in (q, k))
    return softmax(grouped_logits(q, k, dims**-0.5))


def qwen3_5_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    H, D = layer.num_attention_heads, layer.head_dim
    q = linear(layer.q_proj, x).reshape(len(x), H, 2 * D)[..., :D].transpose(1, 0, 2)  # the other half is the gate
    k = heads(linear(layer.k_proj, x), layer.num_key_value_heads)
    dims = int(D * config["partial_rotary_factor"])
    positions = np.arange(len(x), dtype=np.float64)
    q = rotate(rms_norm(q, layer.q_norm), positions, config["rope_theta"], dims)
    k = rotate(rms_norm(k, layer.k_norm), positions, config["rope_theta"], dims)
    return softmax(grouped_logits(q, k, D**-0.5))


def gpt_oss_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    q = heads(linear(layer.q_proj, x), layer.num_attention_heads)
    k = heads(linear(layer.k_proj, x), layer.num_key_value_heads)
    positions = np.arange(len(x), dtype=np.float64)
    q, k = (rotate(part, positions, config["rope_theta"], layer.head_dim) for part in (q, k))
    return softmax(grouped_logits(q, k, layer.head_dim**-0.5), array(layer.sinks))


def nemotron_h_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    q, k = heads(linear(layer.q_proj, x), layer.num_heads), heads(linear(layer.k_proj, x), layer.num_key_value_heads)
    return softmax(grouped_logits(q, k, q.shape[-1] ** -0.5))


def gemma2_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    q, k = heads(linear(layer.q_proj, x), layer.n_heads), heads(linear(layer.k_proj, x), layer.n_kv_heads)
    positions = np.arange(len(x), dtype=np.float64)
    q, k = (rotate(part, positions, config["rope_theta"], layer.head_dim) for part in (q, k))
    cap = config["attn_logit_softcapping"]
    return softmax(cap * np.tanh(grouped_logits(q, k, config["query_pre_attn_scalar"] ** -0.5) / cap))


def deepseek_v3_rows(layer: Any, x: Rows, config: dict[str, Any]) -> Rows:
    H, nope, turning = layer.num_heads, layer.qk_nope_head_dim, layer.qk_rope_head_dim
    q = heads(linear(layer.q_b_proj, rms_norm(linear(layer.q_a_proj, x), layer.q_a_layernorm)), H)
    compressed = linear(layer.kv_a_proj_with_mqa, x)
    latent = rms_norm(compressed[:, : layer.kv_lora_rank], layer.kv_a_layernorm)
    k_nope = np.einsum("sr,hrn->hsn", latent, array(layer.embed_q.weight))
    positions = np.arange(len(x), dtype=np.float64)
    q_turning = rotate(q[..., nope:], positions, config["rope_theta"], turning, interleaved=True)
    k_turning = rotate(compressed[None, :, layer.kv_lora_rank :], positions, config["rope_theta"], turning, True)
    logits = np.einsum("hd,hsd->hs", q[:, -1, :nope], k_nope[:, :M])
    logits += np.einsum("hd,sd->hs", q_turning[:, -1], k_turning[0, :M])
    return softmax(logits * (nope + turning) ** -0.5)


# --- the model's own inputs to those layers --------------------------------------------------------------------------


@contextmanager
def recorded_inputs(layers: list[nn.Module]) -> Iterator[dict[int, list[Rows]]]:
    """Record the inputs of every attention layer, forward by forward, as (L, D) by the layer's identity."""
    seen: dict[int, list[Rows]] = {id(layer): [] for layer in layers}
    kind = type(layers[0])
    original: Callable[..., mx.array] = kind.__call__

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if id(self) in seen:
            seen[id(self)].append(array(x[0]))
        return original(self, x, *args, **kwargs)

    kind.__call__ = call
    try:
        yield seen
    finally:
        kind.__call__ = original


def capture_rows(model: nn.Module, width: int, caches: list[Any] | None = None) -> QueryCapture:
    """Rows of the last prompt token and of three tokens after it."""
    caches = make_prompt_cache(model) if caches is None else caches
    mx.eval(model(mx.array(TOKENS[: M - 1])[None], cache=caches))
    capture = QueryCapture(M, width)
    for step in range(LOOK_AHEAD + 1):
        with capture.row(M + step):
            model(mx.array([[TOKENS[M - 1 + step]]]), cache=caches)
    return capture


def reference_pool(rows: Rows, width: int) -> Rows:
    half = width // 2
    full = [np.convolve(row, np.ones(width) / width) for row in rows.reshape(-1, rows.shape[-1])]
    return np.stack([row[half : half + rows.shape[-1]] for row in full]).reshape(rows.shape)


def self_attn(layer: Any) -> Any:
    return layer.self_attn


@dataclass(frozen=True)
class Family:
    """A kind of attention: its computation by hand, and the tiny model that has it."""

    by_hand: Callable[..., Rows]
    model: str
    changes: dict[str, Any]
    layers: int
    attention_of: Callable[[Any], Any] = self_attn


QWEN_ROPE = {"type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
FAMILIES = {
    "llama-mha": Family(llama_rows, "llama", {"num_key_value_heads": 8}, 4),
    "llama-gqa4": Family(llama_rows, "llama", {"num_key_value_heads": 2}, 4),
    "llama-gqa8": Family(llama_rows, "llama", {"num_key_value_heads": 1}, 4),
    "llama-one-layer": Family(llama_rows, "llama", {"num_hidden_layers": 1, "layer_types": None}, 1),
    "llama-window": Family(llama_rows, "llama+window", {}, 2, lambda x: None if x.use_sliding else x.self_attn),
    "qwen3": Family(llama_rows, "qwen3", {}, 4),
    "qwen3_5": Family(
        qwen3_5_rows,
        "qwen3_5",
        {"rope_parameters": QWEN_ROPE},
        1,
        lambda layer: None if layer.is_linear else layer.self_attn,
    ),
    "gpt_oss": Family(gpt_oss_rows, "gpt_oss", {"layer_types": ["sliding_attention", "full_attention"] * 2}, 2),
    "nemotron_h": Family(nemotron_h_rows, "nemotron_h", {}, 2, lambda x: x.mixer if x.block_type == "*" else None),
    "gemma2": Family(gemma2_rows, "gemma2", {}, 4),
    "gemma2-gqa": Family(gemma2_rows, "gemma2", {"num_key_value_heads": 1}, 4),
    "deepseek_v3": Family(deepseek_v3_rows, "deepseek_v3", {"rope_scaling": None}, 4),
}


def attention_layers(family: Family, model: nn.Module) -> list[nn.Module]:
    """The attention modules that see the whole prompt."""
    layers = [family.attention_of(layer) for layer in model.layers]
    if family.model == "gpt_oss":
        layers = layers[1::2]
    return [layer for layer in layers if layer is not None]


@pytest.mark.parametrize("width", [1, 13])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_rows_equal_attention_by_hand(name: str, width: int) -> None:
    family = FAMILIES[name]
    model = tiny(family.model, **family.changes)
    config = tiny_models()[family.model].config
    config = {**config.get("text_config", config), **family.changes}
    layers = attention_layers(family, model)
    with recorded_inputs(layers) as inputs:
        capture = capture_rows(model, width)
    assert capture.layers == [family.layers] * (LOOK_AHEAD + 1)
    for step, row in enumerate(capture.rows):
        per_layer = [family.by_hand(layer, np.concatenate(inputs[id(layer)][: step + 2]), config) for layer in layers]
        expected = reference_pool(np.concatenate(per_layer), width).max(axis=0)
        np.testing.assert_allclose(np.array(row), expected, rtol=2e-4, atol=1e-6)
        assert expected.max() > 2 / M or width > 1  # far from uniform, or the comparison says little


@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.extended
def test_tiles_of_any_size_give_the_same_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(FAMILIES[name].model, **FAMILIES[name].changes)
    whole = capture_rows(model, 13)
    for tile in (1, 2 * (M + LOOK_AHEAD), 3 * (M + LOOK_AHEAD)):  # one row at a time, two, three
        monkeypatch.setattr("mlx_specprefill.adapters.capture.TILE", tile)
        tiled = capture_rows(model, 13)
        assert tiled.layers == whole.layers
        for row, expected in zip(tiled.rows, whole.rows, strict=True):
            np.testing.assert_allclose(np.array(row), np.array(expected), rtol=1e-5, atol=1e-8)


def test_quantized_caches_are_seen_through_their_softmax() -> None:
    model = tiny("llama", hidden_size=256, num_key_value_heads=2)
    exact = capture_rows(model, 1)
    quantized = capture_rows(model, 1, [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers])
    assert quantized.layers == exact.layers
    for row, other in zip(exact.rows, quantized.rows, strict=True):
        assert np.corrcoef(np.array(row), np.array(other))[0, 1] > 0.95


def test_window_layers_shorter_than_the_prompt_change_nothing() -> None:
    """The ring of 20 is skipped; a prompt that fits into it would be seen whole and counts."""
    model = tiny("llama+window")
    assert capture_rows(model, 13).layers == [2] * (LOOK_AHEAD + 1)
    caches, capture = make_prompt_cache(model), QueryCapture(12, 1)
    mx.eval(model(mx.array(TOKENS[:11])[None], cache=caches))
    with capture.row(12):
        model(mx.array([[1]]), cache=caches)
    assert capture.layers == [4]


@pytest.mark.extended
def test_a_model_without_global_attention_yields_no_row() -> None:
    capture = capture_rows(tiny("recurrent_gemma"), 13)
    assert capture.rows == []
    assert capture.layers == []


# --- single heads of a passage ---------------------------------------------------------------------------------------

# What a number means: the attention calls of a forward that see the whole prompt, and how many calls there are.
CALLS = {"llama-window": ([1, 3], 4), "gpt_oss": ([1, 3], 4), "gemma2": ([0, 1, 2, 3], 4)}
PASSAGES = [(0, 5), (11, 27), (30, M), (M - 1, M), (0, M)]


def read_heads(
    model: nn.Module,
    passage: tuple[int, int],
    heads: dict[int, list[int]] | None,
    cuts: tuple[int, ...],
    caches: list[Any] | None = None,
) -> HeadCapture:
    """The prompt in forwards that end at these cuts; the one that the passage lies in is captured."""
    caches = make_prompt_cache(model) if caches is None else caches
    capture = HeadCapture(M, heads)
    for start, stop in itertools.pairwise((0, *cuts, M)):
        tokens = mx.array(TOKENS[start:stop])[None]
        if start <= passage[0] < stop:
            with capture.of_passage(stop, stop - start, slice(passage[0] - start, passage[1] - start)):
                model(tokens, cache=caches)
        else:
            model(tokens, cache=caches)
        mx.eval([part.state for part in caches])
    return capture


def passage_by_hand(
    family: Family, layer: nn.Module, x: Rows, config: dict[str, Any], passage: tuple[int, int]
) -> Rows:
    """(H, M): the mean over the passage of what each of its tokens sees, as if it were the last one."""
    rows = [family.by_hand(layer, x[: at + 1], config) for at in range(*passage)]
    return np.mean([np.pad(row, [(0, 0), (0, M - row.shape[-1])]) for row in rows], axis=0)


@pytest.mark.parametrize("passage", PASSAGES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_heads_of_a_passage_equal_attention_by_hand(name: str, passage: tuple[int, int]) -> None:
    """Every head of every call, in one pass and in slices; the passage lies anywhere in a longer forward."""
    family = FAMILIES[name]
    model = tiny(family.model, **family.changes)
    config = tiny_models()[family.model].config
    config = {**config.get("text_config", config), **family.changes}
    layers = attention_layers(family, model)
    with recorded_inputs(layers) as inputs:
        read_heads(model, passage, {}, ())
    truth = [passage_by_hand(family, layer, inputs[id(layer)][0], config, passage) for layer in layers]
    numbers, calls = CALLS.get(name, (list(range(family.layers)), family.layers))
    cuts = (22, 27) if name in ("llama-window", "gpt_oss") else (7, 11)
    for ends in {(), tuple(end for end in cuts if not passage[0] < end < passage[1])}:
        capture = read_heads(model, passage, None, ends)
        assert capture.calls == calls
        for number, heads in zip(numbers, truth, strict=True):
            found = np.array(mx.stack([capture.attention[number, head] for head in range(len(heads))]))
            np.testing.assert_allclose(found, heads, rtol=5e-4, atol=1e-6)
            assert (number, len(heads)) not in capture.attention
        if ends and passage[0] >= 27:  # the ring of 20 is full
            assert {call for call, _ in capture.attention} == set(numbers)


# --- pooling ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 20).map(lambda n: 2 * n + 1), st.integers(1, 80), st.integers(0, 1000))
def test_pooling_any_width(width: int, length: int, seed: int) -> None:
    rows = np.random.default_rng(seed).random((1, length))
    got = np.array(pool(mx.array(rows.astype(np.float32)), width))
    np.testing.assert_allclose(got, reference_pool(rows, width), rtol=1e-5, atol=1e-6)


# --- being out of the way --------------------------------------------------------------------------------------------


def test_inert_when_no_capture_is_active() -> None:
    model = tiny("llama")
    capture = capture_rows(model, 13)
    held = len(capture.rows), list(capture.layers)
    wrapped = mx.fast.scaled_dot_product_attention, mx.softmax
    tokens = mx.array([TOKENS])
    with_wrappers = model(tokens)
    mx.fast.scaled_dot_product_attention, mx.softmax = (wrapper.__wrapped__ for wrapper in wrapped)
    try:
        assert mx.array_equal(model(tokens), with_wrappers)
    finally:
        mx.fast.scaled_dot_product_attention, mx.softmax = wrapped
    assert (len(capture.rows), capture.layers) == held


def test_capturing_changes_no_logit() -> None:
    model = tiny("gpt_oss")

    def last(active: bool) -> mx.array:
        caches, capture = make_prompt_cache(model), QueryCapture(M, 13)
        mx.eval(model(mx.array(TOKENS[: M - 1])[None], cache=caches))
        if not active:
            return model(mx.array([[TOKENS[M - 1]]]), cache=caches)
        with capture.row(M):
            return model(mx.array([[TOKENS[M - 1]]]), cache=caches)

    assert mx.array_equal(last(True), last(False))


def test_no_capture_stays_active_after_its_block() -> None:
    model, capture = tiny("llama"), QueryCapture(1, 1)
    with pytest.raises(KeyError), capture.row(1):
        raise KeyError
    with capture.row(2):
        pass
    with capture.row(1):
        mx.eval(model(mx.array([[1]])))
    observed = []
    capture.observe = lambda *args: observed.append(args)
    mx.eval(model(mx.array([[1]])))
    assert observed == []
    assert len(capture.rows) == 1


def test_other_threads_are_not_captured() -> None:
    model, capture = tiny("llama"), QueryCapture(1, 1)
    done: list[bool] = []

    def forward() -> None:
        mx.eval(model(mx.array([[1]])))
        done.append(True)

    with capture.row(1):
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(30)
    assert done
    assert capture.rows == []
