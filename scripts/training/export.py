"""Write a trained model in the layout that `mlx_lm.load` and other readers of such folders expect."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from . import tokenizer as chat
from .model import Decoder, ModelConfig


def export(model: Decoder, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (fp16), configuration and tokenizer to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu().to(torch.float16).contiguous() for name, value in named_weights(model)}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes it private
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    _write(folder / "config.json", model_config(model.config, tokenizer))
    _write(folder / "generation_config.json", {"eos_token_id": tokenizer.token_to_id(chat.END), "do_sample": False})
    _write(folder / "tokenizer_config.json", tokenizer_config(model.config))


def named_weights(model: Decoder) -> list[tuple[str, Tensor]]:
    """The parameters under the names of the qwen3 model type; the output is tied to the embedding."""
    named = [("model.embed_tokens.weight", model.embedding), ("model.norm.weight", model.final_norm)]
    for number, block in enumerate(model.blocks):
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        named += [(f"{attention}.{n}_proj.weight", w) for n, w in zip("qkv", block.qkv, strict=True)]
        named += [(f"{attention}.{n}_norm.weight", g[0]) for n, g in zip("qk", block.qk_gain, strict=True)]
        named += [
            (f"{attention}.o_proj.weight", block.out),
            (f"{prefix}.mlp.gate_proj.weight", block.gate_up[0]),
            (f"{prefix}.mlp.up_proj.weight", block.gate_up[1]),
            (f"{prefix}.mlp.down_proj.weight", block.down),
            (f"{prefix}.input_layernorm.weight", block.attention_norm),
            (f"{prefix}.post_attention_layernorm.weight", block.mlp_norm),
        ]
    return named


def model_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(chat.END),
        "pad_token_id": tokenizer.token_to_id(chat.PAD),
    }


def tokenizer_config(config: ModelConfig) -> dict[str, object]:
    """The content of tokenizer_config.json, chat template included."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": chat.END,
        "pad_token": chat.PAD,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": chat.CHAT_TEMPLATE,
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
