"""Tiny random models of the families that differ, and a pair made of them, without any checkpoint.

The vocabulary is 96 tokens; token 1 is the end of text. Everything is float32 and deterministic by seed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import Event, Failed, Finished, ModelPair, TokenEvent, make_pair
from mlx_specprefill.adapters.depth import first_layers
from mlx_specprefill.adapters.mtp import MTPHead, MTPLayers
from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.selection.heads import whole_values
from tests.support import precision

VOCAB, EOS = 96, 1
WINDOW = 24

_BASE = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 1000.0,
    "max_position_embeddings": 4096,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama", "tie_word_embeddings": False},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False},
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **_BASE,
            **_LINEAR,
            "model_type": "qwen3_5",
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
    },
    "nemotron_h": {
        **{key: _BASE[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")},
        "model_type": "nemotron_h",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 3,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-4,
        "use_bias": True,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["*", "M", "*", "M"],
        "num_hidden_layers": 4,
        "time_step_limit": [1.0, 2.0],
    },
    "gpt_oss": {
        **_BASE,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
FAMILIES = tuple(CONFIGS)


def tiny_model(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A random model; `changes` go into its configuration. Weights are scaled up so that attention is not flat."""
    config = {**CONFIGS[family], **changes}
    module = importlib.import_module(f"mlx_lm.models.{family}")
    install_patches()
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.update(nn.utils.tree_map(_sharpen, model.parameters()))
    model = precision.cast(model)
    mx.eval(model.parameters())
    return model


def _sharpen(array: mx.array) -> mx.array:
    if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array * 1.5


def tokenizer(words: int = VOCAB, special: Iterable[str] = ("<unk>", "<eos>")) -> TokenizerWrapper:
    """A word-level tokenizer: word `wN` is token N."""
    names = [*special, *(f"w{i}" for i in range(len(tuple(special)), words))]
    backend = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>"))


def on_own_layers(pair: ModelPair, count: int) -> ModelPair:
    """The pair's target with its own first layers as a draft that is not calibrated."""
    target, config = pair.target, pair.target_config
    draft, name = first_layers(target, count), f"{pair.target_id} ({count} layers)"
    return make_pair(
        target, pair.tokenizer, config, target_id=pair.target_id, draft=draft, draft_config=config, draft_id=name
    )


@cache  # making a pair probes its models, which takes longer than many a test
def tiny_pair(target: str = "llama", draft: str = "llama", *, context: int = 4096, **changes: Any) -> ModelPair:
    """A pair of random models that share a tokenizer. Tests share it: they leave its models as they are."""
    config = {"max_position_embeddings": context, "vocab_size": VOCAB}
    return make_pair(
        tiny_model(target, seed=1, **changes),
        tokenizer(),
        config,
        draft=tiny_model(draft, seed=2),
        draft_config={"max_position_embeddings": 4096},
    )


def values_of(draft: nn.Module) -> int:
    """Return how many values a token has in the first cache of a draft."""
    cache = make_prompt_cache(draft)
    draft(mx.zeros((1, 2), dtype=mx.int32), cache=cache)
    values = next(whole_values(cache))
    return int(values.shape[0] * values.shape[2])


def random_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(2, VOCAB, length))


def generated(events: Iterable[Event]) -> tuple[list[int], Finished]:
    """The tokens of an answer, and its end."""
    *made, last = events
    assert isinstance(last, Finished), last
    return [event.token for event in made if isinstance(event, TokenEvent)], last


def failed(events: Iterable[Event]) -> Failed:
    """The end of an answer that fails."""
    *_, last = events
    assert isinstance(last, Failed), last
    return last


def greedy(model: nn.Module, prompt: tuple[int, ...], count: int) -> list[int]:
    """The autoregressive answer by re-reading everything for every token: slow and beyond doubt."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(mx.array(tokens)[None])[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
    return tokens[len(prompt) :]


def save_checkpoint(folder: Path, family: str, seed: int = 0, words: int = VOCAB, **changes: Any) -> Path:
    """A checkpoint directory that `mlx_lm.load` accepts."""
    folder.mkdir(parents=True)
    model = tiny_model(family, seed, **changes)
    weights = dict(nn.utils.tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**CONFIGS[family], **changes}))
    tokenizer(words).save_pretrained(folder)
    return folder


def tiny_head(model: nn.Module, seed: int = 5) -> MTPHead:
    """A random MTP head on a model of qwen3_5."""
    mx.random.seed(seed)
    layers = MTPLayers(model.language_model.args)
    layers.eval()
    layers.update(nn.utils.tree_map(_sharpen, layers.parameters()))
    layers.update(nn.utils.tree_map(lambda array: _uneven(array, seed), layers.parameters()))
    layers = precision.cast(layers)
    mx.eval(layers.parameters())
    return MTPHead(model, layers)


def _uneven(array: mx.array, seed: int) -> mx.array:
    """Norm weights of 1 would hide which norm is which."""
    if array.ndim != 1:
        return array
    return array * mx.random.uniform(0.7, 1.3, array.shape, key=mx.random.key(seed + array.size))
