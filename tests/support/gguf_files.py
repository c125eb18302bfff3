"""Tiny random models as GGUF files, written by the gguf package the way llama.cpp's converter does."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from mlx_lm.utils import load_model
from tokenizers.pre_tokenizers import ByteLevel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
F32 = GGMLQuantizationType.F32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
ALPHABET = sorted(ByteLevel.alphabet())
VOCAB = len(SPECIAL) + len(ALPHABET)

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 1000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_BASE, "model_type": "llama"},
    "qwen2": {**_BASE, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**_BASE, "model_type": "qwen3", "head_dim": 32},
    "gemma3": {
        **_BASE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "sliding_window": 8,
        "rope_local_base_freq": 100.0,
        "query_pre_attn_scalar": 32,
    },
}
_NAMES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma3": MODEL_ARCH.GEMMA3,
}
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "rope_local_base_freq": "rope.freq_base_swa",
}
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
KindOf = Callable[[str], GGMLQuantizationType]


@dataclass
class Contents:
    """The contents of a file to write. Tests change them first."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[np.ndarray[Any, Any], GGMLQuantizationType]] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            _add(writer, key, value)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def vocabulary() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer: three control tokens and the bytes, no merges."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*SPECIAL, *ALPHABET],
        "tokenizer.ggml.token_type": [CONTROL] * len(SPECIAL) + [NORMAL] * len(ALPHABET),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def random_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """For every parameter of mlx-lm's model, by its name there."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    random = np.random.default_rng(seed)
    names = {name: array.shape for name, array in nn.utils.tree_flatten(model.parameters())}
    if config["tie_word_embeddings"]:
        names.pop("lm_head.weight", None)
    return {name: _random(name, shape, random) for name, shape in names.items()}


def _random(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Any:
    values = random.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return values * np.float32(0.2) + np.float32("norm" in name)
    return values * np.float32(1.5 / shape[-1] ** 0.5)


def contents(
    architecture: str, config: Mapping[str, Any], weights: Weights, kind_of: KindOf = lambda _: F32
) -> Contents:
    """As llama.cpp's converter writes it: rows of q and k in the order of its RoPE, 1 added to Gemma's norms."""
    made = Contents(
        architecture, {f"{architecture}.{_KEYS[k]}": v for k, v in config.items() if k in _KEYS} | vocabulary()
    )
    names = get_tensor_name_map(_NAMES[architecture], config["num_hidden_layers"])
    for name, array in weights.items():
        if architecture == "llama" and any(part in name for part in ("q_proj", "k_proj")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = array.reshape(heads, 2, config["head_dim"] // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            array = array + np.float32(1)
        tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert tensor is not None
        made.tensors[tensor] = array, kind_of(name) if array.ndim > 1 else F32
    return made


def tiny(architecture: str, **changes: Any) -> Contents:
    """A random model of the architecture, its weights float32."""
    config = {**CONFIGS[architecture], **changes}
    return contents(architecture, config, random_weights(config))


def rounded(weights: Weights, kind_of: KindOf) -> Weights:
    """Return the weights after the gguf package has packed and unpacked them."""
    return {
        name: dequantize(quantize(array, kind_of(name)), kind_of(name)) if array.ndim > 1 else array
        for name, array in weights.items()
    }


def from_safetensors(folder: Path, config: Mapping[str, Any], weights: Weights) -> nn.Module:
    """The same model the ordinary way."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), {name: mx.array(array) for name, array in weights.items()})
    (folder / "config.json").write_text(json.dumps(dict(config)))
    model: nn.Module = load_model(folder)[0]
    return model
