"""Random weights in the shapes of real models. The values of weights do not change the time of a forward."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specprefill import ModelPair, make_pair
from mlx_specprefill.adapters.depth import layers_of
from mlx_specprefill.calibration.finding_heads import eligible_calls
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head

Config = dict[str, Any]

SHAPES: dict[str, Config] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
GROUP = 64  # weights that share a scale; widths stay multiples of it
WIDTH = re.compile("(hidden|intermediate|vocab|latent)_size$")
HEADS = {  # the number of the first is a multiple of that of the second
    "num_attention_heads": "num_key_value_heads",
    "linear_num_value_heads": "linear_num_key_heads",
    "mamba_num_heads": "n_groups",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
FINAL_NORM = re.compile(r"(.*\.)?(model\.norm|backbone\.norm_f)\.weight")
CONTEXT = 131_072  # tokens, of saved checkpoints
END = "<|im_end|>"


def add_options(parser: argparse.ArgumentParser, shape: str | None, **usual: int) -> None:
    """Add the options of a shape and its cuts. `usual` has the defaults of layers, draft_layers and narrow."""
    parser.add_argument("--shape", choices=list(SHAPES), default=shape, help="random weights in this model's shape")
    parser.add_argument("--draft-of", choices=list(SHAPES), help="the draft of another shape")
    parser.add_argument("--layers", type=int, help="first layers of a shape's target; 0: all")
    parser.add_argument("--draft-layers", type=int, help="first layers of a shape's draft; 0: all")
    parser.add_argument("--narrow", type=int, help="divide a shape's widths, for machines without a GPU")
    parser.add_argument("--experts", type=int, help="per expert layer of a shape; the work per token stays")
    parser.set_defaults(**usual)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Add the options that `random_pair` reads besides."""
    parser.add_argument("--quantised", action="store_true", help="a shape at its usual bits per weight")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])


def config_of(options: argparse.Namespace, side: str, **changes: Any) -> Config:
    """Return the configuration of a shape's "target" or "draft", cut to the options, with changes of its text model."""
    config = SHAPES[_shape_of(options, side)][side]
    text = dict(config.get("text_config", config))
    layers = (options.layers if side == "target" else options.draft_layers) or text["num_hidden_layers"]
    text["num_hidden_layers"] = layers
    if "hybrid_override_pattern" in text:
        text["hybrid_override_pattern"] = text["hybrid_override_pattern"][:layers]
    if "layer_types" in text:
        text["layer_types"] = (text["layer_types"] * layers)[:layers]
    if options.narrow > 1:
        text |= _narrower(text, options.narrow)
    for name in EXPERTS:
        if options.experts is not None and name in text:
            text[name] = max(min(options.experts, text[name]), text["num_experts_per_tok"])
    text |= changes
    return {**config, "text_config": text} if "text_config" in config else text


def _shape_of(options: argparse.Namespace, side: str) -> str:
    return str((options.draft_of if side == "draft" else None) or options.shape)


def _narrower(text: Config, factor: int) -> Config:
    """Return the sizes of a model with about 1 / `factor` of its width, heads, experts' sizes and vocabulary."""
    sizes = {name: max(1, round(text[name] / factor / GROUP)) * GROUP for name in text if WIDTH.search(name)}
    for many, few in HEADS.items():
        if many in text:
            sizes[few] = max(1, text[few] // factor)
            sizes[many] = max(1, round(max(1, text[many] // factor) / sizes[few])) * sizes[few]
    return sizes


def random_model(config: Config, dtype: mx.Dtype = mx.float32, bits: int | None = None) -> nn.Module:
    """Return mlx-lm's own model of that configuration with random weights, not yet evaluated."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if bits is not None:
        fits = lambda _, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP == 0  # noqa: E731
        nn.quantize(model, GROUP, bits, class_predicate=fits)
    model.eval()
    return model


def random_pair(options: argparse.Namespace, tokenizer: TokenizerWrapper, **changes: Any) -> ModelPair:
    """Return a shape's target and draft with heads; `--quantised`: at the bits per weight at which Macs hold them."""
    models = {}
    for side in ("target", "draft"):
        config = config_of(options, side, **changes)
        bits = SHAPES[_shape_of(options, side)]["bits"][side] if options.quantised else None
        model = random_model(config, getattr(mx, options.dtype, mx.float32), bits)  # "auto" is float32
        mx.eval(
            model.parameters(), model(mx.array([[1, 2]]))
        )  # frequencies are no parameters, and engines have threads
        models[side] = model, config
    (target, config), (draft, draft_config) = models.values()
    pair = make_pair(
        target,
        tokenizer,
        config,
        target_id=f"random {options.shape}",
        draft=draft,
        draft_config=draft_config,
        draft_id=f"random draft of {_shape_of(options, 'draft')}",
    )
    return with_heads(pair, _last_head(draft))


def _last_head(draft: nn.Module) -> DraftHeads:
    """Return heads as calibration finds them, so that the draft reads within its window; all of its layers run."""
    layers = len(layers_of(draft))
    return DraftHeads((Head(max(eligible_calls(draft)), 0, 1.0),), layers, layers, {})


# --- checkpoints that any server loads -------------------------------------------------------------------------------


def save_random(options: argparse.Namespace, side: str, tokenizer: Path, folder: Path, template: str) -> Path:
    """Write a checkpoint whose answers end at once, as after a call of a tool, so that a conversation goes on there.

    Args:
        tokenizer: a folder with one whose ids fit the shape's vocabulary.
        template: for chats.
    """
    words = _with_end_first(json.loads((tokenizer / "tokenizer.json").read_text()))
    config = config_of(options, side, vocab_size=len(words["model"]["vocab"]), max_position_embeddings=CONTEXT)
    weights = dict(tree_flatten(random_model(config).parameters()))
    (norm,) = filter(FINAL_NORM.fullmatch, weights)
    weights[norm] *= 0  # so all logits are equal, and the first id is the likeliest
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "torch_dtype": "float32"}))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"chat_template": template, "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def _with_end_first(words: Config) -> Config:
    """Return the same tokenizer, in which the end of a turn has the first id."""
    vocabulary, ids = words["model"]["vocab"], {token["id"]: token for token in words["added_tokens"]}
    end = next(token for token in words["added_tokens"] if token["content"] == END)
    if end["id"]:
        other = next(name for name, number in vocabulary.items() if number == 0)
        vocabulary[other], vocabulary[END] = end["id"], 0
        if 0 in ids:
            ids[0]["id"] = end["id"]
        end["id"] = 0
        words["added_tokens"].sort(key=lambda token: token["id"])
    return words
