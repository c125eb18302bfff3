"""Retrieval heads on a target's first layers: what they compute, what they cost, and files that don't fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    LoadError,
    ModelPair,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    load_pair,
    make_pair,
)
from mlx_specprefill.adapters.capture import HeadCapture, record_attention
from mlx_specprefill.adapters.depth import first_layers, layers_of
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.cache.prefix.identity import model_identity
from mlx_specprefill.loading.footprint import measure_footprint, weight_bytes
from mlx_specprefill.selection.retrieval_heads import RetrievalDraft, RetrievalHeads, attach_heads
from tests.support.precision import assert_close, numbers
from tests.support.retrieval_heads import write_heads
from tests.support.tiny import VOCAB, generated, random_prompt, save_checkpoint, tiny_model, tokenizer

HIDDEN, HEADS, WIDTH, LAYERS = 48, 3, 8, 2
PROMPT = mx.array(random_prompt(40, 5))[None]
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=0, densify=False), prefill_step=32)


def heads(seed: int = 0) -> RetrievalHeads:
    mx.random.seed(seed)
    made = RetrievalHeads(HIDDEN, HEADS, WIDTH, 1e-5)
    made.q_proj.bias = mx.random.normal((HEADS * WIDTH,))
    made.set_dtype(mx.float16)  # as a file holds them
    made.set_dtype(mx.float32)
    return made


def written(tmp_path: Path, model: nn.Module, layers: int = LAYERS) -> Path:
    write_heads(tmp_path / "heads.safetensors", heads(), model, layers, {"origin": "a test"})
    return tmp_path / "heads.safetensors"


def own_pair(tmp_path: Path, target: nn.Module | None = None) -> ModelPair:
    target = tiny_model("llama", 1) if target is None else target
    config = {"max_position_embeddings": 4096, "vocab_size": VOCAB}
    file = written(tmp_path, target)
    return make_pair(target, tokenizer(), config, draft="self", draft_heads=file)


def asked(length: int = 200) -> GenerationRequest:
    return GenerationRequest(random_prompt(length), 8, specprefill=SpecPrefillOptions(enabled=True, return_spans=True))


# --- what they compute -----------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def formula(model: nn.Module, layer: RetrievalHeads) -> np.ndarray:
    """Attention (heads, M, M): softmax of (Wq n(h_i) + b) . Wk n(h_j) / sqrt(width), n the RMS norm, in float64."""
    hidden = numbers(first_layers(model, LAYERS)(PROMPT))[0].astype(np.float64)
    inner = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5)
    asking, found = (
        inner @ numbers(layer.q_proj.weight).T + numbers(layer.q_proj.bias),
        inner @ numbers(layer.k_proj.weight).T,
    )
    q, k = (x.reshape(-1, HEADS, WIDTH).transpose(1, 0, 2) for x in (asking, found))
    logits = q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH)
    return softmax(np.where(np.tri(logits.shape[-1], dtype=bool), logits, -np.inf))


def captured(draft: nn.Module, rows: slice, step: int) -> np.ndarray:
    """Return these rows' mean attention, (heads, M), for a prompt that is read in prefill chunks."""
    capture, cache = HeadCapture(PROMPT.size, {LAYERS: range(HEADS)}), make_prompt_cache(draft)
    for start in range(0, PROMPT.size, step):
        end = min(start + step, PROMPT.size)
        if start <= rows.start and rows.stop <= end:
            with capture.of_passage(end, end - start, slice(rows.start - start, rows.stop - start)):
                draft(PROMPT[:, start:end], cache=cache)
        else:
            draft(PROMPT[:, start:end], cache=cache)
        mx.eval([part.state for part in cache])
    assert sorted(capture.attention) == [(LAYERS, head) for head in range(HEADS)]
    return np.stack([np.array(capture.attention[LAYERS, head]) for head in range(HEADS)])


@pytest.mark.parametrize("step", [40, 20, 12])
def test_a_capture_sees_the_attention_of_the_formula(step: int) -> None:
    """Whole or in slices, also where the captured rows don't begin their slice."""
    model = tiny_model("llama", 1)
    draft = RetrievalDraft(model, LAYERS, heads())
    expected = formula(model, heads())[:, 36:40].mean(1)
    assert_close(captured(draft, slice(36, 40), step), expected, rtol=1e-5, atol=1e-6)


def test_their_attention_call_is_the_one_after_those_of_the_layers() -> None:
    model = tiny_model("llama", 1)
    draft = RetrievalDraft(model, LAYERS, heads())
    with record_attention() as record:
        draft(PROMPT)
    assert [queries.shape[1] for queries in record.queries] == [4] * LAYERS + [HEADS]
    assert [shape[1] for shape in record.keys] == [2] * LAYERS + [HEADS]


def test_the_pair_knows_which_heads_count(tmp_path: Path) -> None:
    pair = own_pair(tmp_path)
    assert pair.heads.by_call == {LAYERS: [0, 1, 2]}
    assert (pair.heads.depth, pair.heads.layers, pair.heads.refusal) == (LAYERS + 1, 3, None)


def test_what_they_add_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward's result and caches don't depend on the attention call of the heads."""
    draft = RetrievalDraft(tiny_model("llama", 1), LAYERS, heads())
    assert mx.array_equal(draft(PROMPT), first_layers(draft.whole, LAYERS)(PROMPT)).item()
    real = mx.fast.scaled_dot_product_attention

    def poisoned(q: mx.array, k: mx.array, v: mx.array, **kwargs: object) -> mx.array:
        return real(q, k, v, **kwargs) if q.shape[1] != HEADS else mx.full(q.shape, mx.nan)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", poisoned)
    cache = make_prompt_cache(draft)
    draft(PROMPT, cache=cache)
    assert all(bool(mx.isfinite(array).all().item()) for part in cache for array in part.state)


# --- as a draft ------------------------------------------------------------------------------------------------------


def test_they_are_a_layer_with_a_cache_of_their_own() -> None:
    model = tiny_model("llama", 1)
    draft = RetrievalDraft(model, LAYERS, heads())
    cache = make_prompt_cache(draft)
    draft(PROMPT, cache=cache)
    assert len(cache) == len(layers_of(draft)) == LAYERS + 1
    assert {int(part.offset) for part in leaves(cache)} == {PROMPT.size}
    assert cache[-1].keys.shape[::2] == (1, cache[0].keys.shape[2])
    assert cache[-1].keys.shape[1::2] == (HEADS, WIDTH)
    of_layers = measure_footprint(first_layers(model, LAYERS)).per_token
    assert measure_footprint(draft).per_token == of_layers + 4 * HEADS * (WIDTH + 1)


def test_no_weight_of_the_target_is_copied_and_their_own_are_counted() -> None:
    model = tiny_model("llama", 1)
    draft, own = RetrievalDraft(model, LAYERS, heads()), 4 * HEADS * WIDTH * (1 + 2 * HIDDEN)
    shared = {id(array) for _, array in tree_flatten(model.parameters())}
    added = [array for _, array in tree_flatten(draft.parameters()) if id(array) not in shared]
    assert sum(array.nbytes for array in added) == own
    assert weight_bytes(draft, model) == own


def test_a_cache_is_named_after_the_heads_that_filled_it() -> None:
    model = tiny_model("llama", 1)
    drafts = [first_layers(model, LAYERS), *(RetrievalDraft(model, LAYERS, heads(seed)) for seed in (0, 1))]
    assert len({model_identity(draft, {}) for draft in drafts}) == 3


def test_the_engine_answers_with_them_also_after_a_prefix_hit(tmp_path: Path) -> None:
    pair = own_pair(tmp_path)
    assert (pair.sparse_refusal, pair.draft_id) == (None, "target (2 of 3 layers and retrieval heads)")
    longer = replace(asked(), prompt=(*asked().prompt[:120], *random_prompt(80, 9)))
    with Engine(pair, CONFIG) as engine:
        generated(engine.generate(asked()))
        warm, last = generated(engine.generate(longer))
        memory = engine.stats().memory
    with Engine(pair, CONFIG) as engine:
        cold, reference = generated(engine.generate(longer))
    assert last.report.mode == "sparse"
    assert (warm, last.report.kept_spans) == (cold, reference.report.kept_spans)
    assert memory.draft_weights == weight_bytes(pair.draft, pair.target) > 0


# --- files -----------------------------------------------------------------------------------------------------------


def test_from_files(tmp_path: Path) -> None:
    where = save_checkpoint(tmp_path / "m", "llama", 1)
    file = written(tmp_path, load_pair(where).target)
    draft = load_pair(where, "self", draft_heads=file).draft
    assert isinstance(draft, RetrievalDraft)
    assert draft.count == LAYERS
    stored, loaded = (dict(tree_flatten(part.parameters())) for part in (heads(), draft.retrieval))
    assert stored.keys() == loaded.keys()
    assert all(bool(mx.array_equal(stored[name], loaded[name]).item()) for name in stored)


def test_they_take_the_type_of_the_target(tmp_path: Path) -> None:
    target = tiny_model("llama", 1)
    file = written(tmp_path, target)
    target.set_dtype(mx.bfloat16)
    draft = attach_heads(target, file)
    assert {array.dtype for _, array in tree_flatten(draft.retrieval.parameters())} == {mx.bfloat16}


def test_another_models_heads_are_refused(tmp_path: Path) -> None:
    target = tiny_model("llama", 1)
    file = written(tmp_path, target)
    target.layers[LAYERS - 1].post_attention_layernorm.weight += 0.1
    with pytest.raises(LoadError, match=r"heads.safetensors: .* trained on another model .*layer 2 differs"):
        attach_heads(target, file)
    with pytest.raises(LoadError, match="trained on another model"):
        attach_heads(tiny_model("llama", 1, hidden_size=64), file)
    with pytest.raises(LoadError, match="read the first 2 layers; the draft has 1"):
        attach_heads(tiny_model("llama", 1, num_hidden_layers=1), file)


def test_heads_without_a_draft(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"draft_heads is .*, but there is no draft"):
        make_pair(tiny_model("llama"), tokenizer(), {}, draft_heads=tmp_path / "heads.safetensors")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing", None, "heads.safetensors"),
        ("text", b"not safetensors at all", "heads.safetensors"),
        ("cut", "cut", "heads.safetensors"),
        ("foreign", "foreign", "no retrieval heads that this version reads"),
        ("shape", "shape", "arrays of shapes"),
        ("header", "header", "invalid literal"),
        ("zero", "zero", "at least 1"),
    ],
)
def test_broken_files_give_one_line(tmp_path: Path, name: str, content: bytes | str | None, words: str) -> None:
    target = tiny_model("llama", 1)
    file = written(tmp_path, target)
    whole = file.read_bytes()
    arrays, known = mx.load(str(file), return_metadata=True)
    changed = {"foreign": {}, "shape": known | {"heads": "2"}, "header": known | {"heads": "x"}}
    changed["zero"] = known | {"width": "0"}
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    elif name == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    else:
        mx.eval(arrays)
        mx.save_safetensors(str(file), arrays, changed[name])
    with pytest.raises(LoadError, match=words) as caught:
        attach_heads(target, file)
    assert "\n" not in str(caught.value)


def test_what_a_file_says_of_itself(tmp_path: Path) -> None:
    data = written(tmp_path, tiny_model("llama", 1)).read_bytes()
    known = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert (known["origin"], known["layers"], known["heads"]) == ("a test", "2", "3")
