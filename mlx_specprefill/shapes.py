"""Real model shapes without their weights, and what a prefill of them computes.

Time to first token does not depend on what the weights say, so random ones in a real shape measure it. Sizes are those
of published models, not checked against their files; they matter for speed only.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from .cache.positioned import leaves
from .errors import InvalidRequestError

__all__ = [
    "SHAPES",
    "Quantisation",
    "Shape",
    "ShapeWork",
    "fewer_layers",
    "find_shape",
    "narrower",
    "prefill_macs",
    "random_model",
    "shape_work",
]

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """mlx-lm's affine layout: `bits` per weight, a scale and a bias per `group_size` of them."""

    bits: int
    group_size: int = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and its usual draft, as mlx-lm's configurations, and how Macs usually hold them."""

    target: Config
    draft: Config
    target_bits: int
    draft_bits: int


def _llama(**sizes: Any) -> Config:
    common = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131072}
    return {**common, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8, **sizes}


def _qwen3_5(model_type: str, **sizes: Any) -> Config:
    text = {
        "model_type": f"{model_type}_text",
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": {"type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": model_type == "qwen3_5",
        **sizes,
    }
    return {"model_type": model_type, "text_config": text}


def _nemotron_h(pattern: str, **sizes: Any) -> Config:
    return {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "head_dim": 128,
        "attention_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 262144,
        "hybrid_override_pattern": list(pattern),
        **sizes,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}
    return {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "head_dim": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "layer_types": kinds,
        "rope_scaling": scaling | {"beta_slow": 1.0, "truncate": False},
        "max_position_embeddings": 131072,
    }


_ROUND = 64  # widths stay multiples of this, and of a quantisation group
_WIDTHS = {
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
    "moe_shared_expert_intermediate_size", "moe_latent_size",
}  # fmt: skip
_HEADS = {
    "num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads", "mamba_num_heads",
    "n_groups",
}  # fmt: skip
_MOE = {"num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True}
_DENSE_QWEN = _qwen3_5(
    "qwen3_5",
    hidden_size=2048,
    num_hidden_layers=24,
    intermediate_size=6144,
    num_attention_heads=8,
    linear_num_value_heads=16,
)
# 40 Mamba-2, 8 attention and 40 expert layers
_NEMOTRON_120B = ("ME" * 5 + "*") * 8
# 21 Mamba-2, 4 attention and 17 MLP layers
_NEMOTRON_4B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M*-M-M-M-M-M*MMMM"

SHAPES: Mapping[str, Shape] = {
    "llama-3.1-8b": Shape(
        _llama(hidden_size=4096, num_hidden_layers=32, intermediate_size=14336, tie_word_embeddings=False),
        _llama(hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, tie_word_embeddings=True),
        target_bits=4,
        draft_bits=4,
    ),
    "qwen3.5-35b-a3b": Shape(
        _qwen3_5(
            "qwen3_5_moe",
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            linear_num_value_heads=32,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            **_MOE,
        ),
        _DENSE_QWEN,
        target_bits=8,
        draft_bits=4,
    ),
    "qwen3.5-122b-a10b": Shape(
        _qwen3_5(
            "qwen3_5_moe",
            hidden_size=3072,
            num_hidden_layers=48,
            num_attention_heads=32,
            linear_num_value_heads=64,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            **_MOE,
        ),
        _DENSE_QWEN,
        target_bits=5,
        draft_bits=4,
    ),
    "nemotron-h-120b": Shape(
        _nemotron_h(
            _NEMOTRON_120B,
            hidden_size=4096,
            intermediate_size=2688,
            num_attention_heads=32,
            num_key_value_heads=2,
            mamba_num_heads=128,
            mamba_head_dim=64,
            n_routed_experts=512,
            num_experts_per_tok=22,
            n_shared_experts=1,
            moe_intermediate_size=2688,
            moe_shared_expert_intermediate_size=5376,
            moe_latent_size=1024,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=5.0,
        ),
        _nemotron_h(
            _NEMOTRON_4B,
            hidden_size=3136,
            intermediate_size=12544,
            num_attention_heads=40,
            num_key_value_heads=8,
            mamba_num_heads=96,
            mamba_head_dim=80,
        ),
        target_bits=5,
        draft_bits=4,
    ),
    "gpt-oss-120b": Shape(_gpt_oss(36, 128), _gpt_oss(24, 32), target_bits=4, draft_bits=4),
}


@dataclass(frozen=True, slots=True)
class ShapeWork:
    """Multiply-accumulates of one prompt: the target over everything, the draft over everything, the target over the
    kept share."""

    full: int
    draft: int
    kept: int

    @property
    def ratio(self) -> float:
        """r: the draft's work in shares of the target's."""
        return self.draft / self.full

    @property
    def most_speedup(self) -> float:
        """Of the time to first token, if every operation took the same time."""
        return self.full / (self.draft + self.kept)


def shape_work(name: str, tokens: int, keep_pct: Fraction) -> ShapeWork:
    """What a prompt of `tokens` costs in a shape, without building its weights.

    Raises:
        InvalidRequestError: there is no such shape.
    """
    shape = find_shape(name)
    target, draft = random_model(shape.target), random_model(shape.draft)
    kept = max(1, round(float(keep_pct) * tokens))
    return ShapeWork(
        full=prefill_macs(target, shape.target, tokens),
        draft=prefill_macs(draft, shape.draft, tokens),
        kept=prefill_macs(target, shape.target, kept),
    )


def find_shape(name: str) -> Shape:
    """The shape of that name.

    Raises:
        InvalidRequestError: there is none.
    """
    if name not in SHAPES:
        raise InvalidRequestError(f"no shape {name!r}; there are: {', '.join(SHAPES)}", field="--shape")
    return SHAPES[name]


def fewer_layers(config: Config, layers: int) -> Config:
    """The same model with its first `layers` layers; patterns of layer kinds are cut."""
    text = dict(config.get("text_config") or config)
    for name in ("hybrid_override_pattern", "layer_types"):
        if name in text:
            text[name] = text[name][:layers]
    text["num_hidden_layers"] = layers
    return {**config, "text_config": text} if "text_config" in config else text


def narrower(config: Config, factor: int) -> Config:
    """The same model with about 1 / `factor` of its width, heads, experts' sizes and vocabulary; head sizes stay."""
    text = dict(config.get("text_config") or config)
    for name in _WIDTHS & text.keys():
        text[name] = max(_ROUND, round(text[name] / factor / _ROUND) * _ROUND)
    for name in _HEADS & text.keys():
        text[name] = max(1, text[name] // factor)
    _keep_divisible(text, "num_attention_heads", "num_key_value_heads")
    _keep_divisible(text, "linear_num_value_heads", "linear_num_key_heads")
    _keep_divisible(text, "mamba_num_heads", "n_groups")
    return {**config, "text_config": text} if "text_config" in config else text


def _keep_divisible(text: Config, many: str, few: str) -> None:
    """Groups of equal size: the larger count becomes a multiple of the smaller one."""
    if many in text:
        text[many] = max(1, round(text[many] / text[few])) * text[few]


def random_model(config: Config, dtype: mx.Dtype = mx.float32, quantisation: Quantisation | None = None) -> nn.Module:
    """mlx-lm's own model of that configuration with random weights, not yet evaluated.

    A quantised layout is generated as it is stored: no weight ever exists in 16 or 32 bits.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if quantisation is not None:
        _quantise(model, quantisation)
    model.eval()
    return model


def _quantise(model: nn.Module, quantisation: Quantisation) -> None:
    """mlx-lm's quantised modules around random bits. What they were made from stays an unevaluated graph, and goes."""
    nn.quantize(model, quantisation.group_size, quantisation.bits, class_predicate=_divisible(quantisation.group_size))
    for _, module in model.named_modules():
        if not hasattr(module, "bits"):
            continue
        width = module.scales.shape[-1] * quantisation.group_size
        scale = 1 / math.sqrt(width) / 2 ** (quantisation.bits - 1)
        module.weight = mx.random.randint(0, 2**31, module.weight.shape).astype(mx.uint32)
        module.biases = mx.full(module.biases.shape, -scale * 2 ** (quantisation.bits - 1), module.biases.dtype)
        module.scales = mx.full(module.scales.shape, scale, module.scales.dtype)


def _divisible(group_size: int) -> Any:
    return lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0


def prefill_macs(model: nn.Module, config: Config, tokens: int) -> int:
    """Multiply-accumulates of a prefill of `tokens` (SpecPrefill, appendix E, table 5), for any layout of layers.

    Every matrix counts once per token, an expert's as often as it is routed to; attention counts the whole square, a
    sliding window its width; the output projection counts once, because only the last row needs it (the paper's counts
    every row). Normalisation, rotation, convolutions and state updates are left out.
    """
    text = config.get("text_config") or config
    args: Any = getattr(model, "args", None)
    hidden = int(text.get("hidden_size") or args.hidden_size)
    vocab = int(text.get("vocab_size") or args.vocab_size)
    per_token = sum(_weights_per_token(module, text, args) for _, module in model.named_modules())
    per_token -= _output_weights(model)
    return tokens * per_token + hidden * vocab + _attention_macs(model, text, args, tokens)


def _weights_per_token(module: nn.Module, text: Config, args: Any) -> int:
    if isinstance(module, SwitchLinear):
        routed = text.get("num_experts_per_tok") or args.num_experts_per_tok
        return int(module.weight.size) * int(routed) // int(module.num_experts)
    return int(module.weight.size) if isinstance(module, nn.Linear) else 0


def _output_weights(model: nn.Module) -> int:
    heads = [module for name, module in model.named_modules() if name.split(".")[-1] == "lm_head"]
    return sum(int(head.weight.size) for head in heads)


def _attention_macs(model: nn.Module, text: Config, args: Any, tokens: int) -> int:
    """Scores and values of all heads: 2 * S * S * H * head_dim per layer that sees everything."""
    heads = int(text.get("num_attention_heads") or args.num_attention_heads)
    head_dim = text.get("head_dim") or getattr(args, "head_dim", None) or int(text["hidden_size"]) // heads
    seen = 0
    for part in leaves(list(make_prompt_cache(model))):
        if isinstance(part, RotatingKVCache):
            seen += min(tokens, int(part.max_size))
        elif isinstance(part, KVCache):
            seen += tokens
    return 2 * tokens * seen * heads * int(head_dim)
