"""A pair with random weights in a real shape: what the weights say does not change the time they take."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import ModelPair, make_pair
from mlx_specprefill.shapes import Config, Quantisation, fewer_layers, find_shape, narrower, random_model

__all__ = ["random_pair"]

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def random_pair(
    name: str,
    layers: int | None = None,
    experts: int | None = None,
    narrow: int = 1,
    dtype: str = "float32",
    quantised: bool = False,
) -> ModelPair:
    """Target and draft of a shape.

    Args:
        layers: of the target; the draft gets the same share of its own, and both at least one attention layer.
        experts: per expert layer; how many of them a token is routed to stays, and with it the work per token.
        narrow: divides every width but the heads' own, where a whole layer is too much for the machine.
        quantised: at the shape's usual bits per weight.

    Raises:
        InvalidRequestError: there is no such shape.
    """
    shape = find_shape(name)
    share = 1.0 if layers is None else layers / depth(shape.target)
    sides = []
    for config, bits in ((shape.target, shape.target_bits), (shape.draft, shape.draft_bits)):
        cut = fewer_layers(config, max(round(share * depth(config)), first_attention(config)))
        cut = cut if experts is None else fewer_experts(cut, experts)
        cut = cut if narrow == 1 else narrower(cut, narrow)
        mx.random.seed(0)
        model = random_model(cut, DTYPES[dtype], Quantisation(bits) if quantised else None)
        mx.eval(model.parameters())
        sides.append((model, cut))
    (target, config), (draft, draft_config) = sides
    return make_pair(
        target,
        placeholder_tokenizer(),
        config,
        target_id=f"random {name}",
        draft=draft,
        draft_config=draft_config,
        draft_id=f"random draft of {name}",
    )


def text_of(config: Config) -> Config:
    return config.get("text_config") or config


def depth(config: Config) -> int:
    text = text_of(config)
    return int(text.get("num_hidden_layers") or len(text["hybrid_override_pattern"]))


def first_attention(config: Config) -> int:
    """Layers up to the first one that sees the whole prompt."""
    text = text_of(config)
    if "hybrid_override_pattern" in text:
        return int(text["hybrid_override_pattern"].index("*")) + 1
    if "layer_types" in text:
        return int(text["layer_types"].index("full_attention")) + 1
    return int(text.get("full_attention_interval", 1))


def fewer_experts(config: Config, experts: int) -> Config:
    text = dict(text_of(config))
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in text:
            text[name] = max(min(experts, text[name]), text.get("num_experts_per_tok", 4))
    return {**config, "text_config": text} if "text_config" in config else text


def placeholder_tokenizer() -> TokenizerWrapper:
    """Nothing is tokenized; a pair has to have one."""
    inner = Tokenizer(models.WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>"))
