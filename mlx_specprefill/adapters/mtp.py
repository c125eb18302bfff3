"""The multi-token prediction head of Qwen3.5: one more decoder layer, which predicts the token after the next one.

Entry p of its text joins the target's final hidden state of token p with the embedding of token p + 1, and gives the
distribution of token p + 2 through the target's own output projection:

    x_p   = fc([pre_fc_norm_embedding(embed(t_{p+1})), pre_fc_norm_hidden(h_p)])
    out_p = norm(layer(x_0 ... x_p));  further guesses take out_p in place of a hidden state

h_p is the input of the output projection, after the target's last norm. mlx-lm drops these weights when it loads a
checkpoint, so they are read from its files again. Converted checkpoints often lack them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModel, TextModelArgs
from mlx_lm.utils import infer_quant_config

from ..errors import LoadError
from .registry import architecture_of

ARCHITECTURES = ("qwen3_5", "qwen3_5_moe")
Tensors = dict[str, mx.array]
_PREFIX = re.compile(r"^(?:.*\.)?mtp\.")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)\.(\w+)$")
# Norms whose weights lie around 1. A raw checkpoint stores them minus 1.
_TELLING_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


class MTPLayers(nn.Module):  # type: ignore[misc]
    """The head's own weights, named as in the checkpoint without the prefix `mtp.`."""

    def __init__(self, args: TextModelArgs) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.layers = [DecoderLayer(args, args.full_attention_interval - 1)]  # one with full attention
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, embedding: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        joined = mx.concatenate([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], axis=-1)
        x = self.fc(joined)
        out: mx.array = self.norm(self.layers[0](x, create_attention_mask(x, cache), cache))
        return out


class MTPHead:
    """A head on its target; it shares the target's embedding and output projection.

    Args:
        model: a model of `mlx_lm.models.qwen3_5` or `qwen3_5_moe`.
    """

    def __init__(self, model: nn.Module, layers: MTPLayers) -> None:
        self.layers = layers
        self._text: TextModel = model.language_model

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for _, array in tree_flatten(self.layers.parameters()))

    @property
    def entry_bytes(self) -> int:
        """Return the bytes of one entry's keys and values."""
        args = self._text.args
        return 2 * int(args.num_key_value_heads * args.head_dim) * int(self.layers.norm.weight.dtype.size)

    def run_target(self, tokens: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Run the target; return its logits (1, L, V), and the hidden states (1, L, D) behind its last norm."""
        hidden: mx.array = self._text.model(tokens, cache)
        return self.logits(hidden), hidden

    def __call__(self, hidden: mx.array, following: mx.array, cache: Any) -> mx.array:
        """Read entries; return the hidden state for the next guess, (1, L, D).

        Args:
            hidden: (1, L, D).
            following: the token after each, (1, L).
            cache: one layer's KV cache; it holds all earlier entries.
        """
        return self.layers(self._text.model.embed_tokens(following), hidden, cache)

    def logits(self, out: mx.array) -> mx.array:
        """Return the logits: (1, L, D) -> (1, L, V)."""
        if self._text.args.tie_word_embeddings:
            tied: mx.array = self._text.model.embed_tokens.as_linear(out)
            return tied
        projected: mx.array = self._text.lm_head(out)
        return projected


def load_mtp_head(model: nn.Module, folder: Path) -> MTPHead:
    """Load the head from a checkpoint's files, in their dtypes and not yet read from disk.

    Raises:
        LoadError: there is none, or none that fits; the message gives the reason.
    """
    if architecture_of(model) not in ARCHITECTURES:
        raise LoadError(f"MTP heads of {architecture_of(model)} are not supported")
    args: TextModelArgs = model.language_model.args
    _check_config(folder)
    tensors = normalise(_tensors(folder))
    layers = MTPLayers(args)
    layers.eval()
    try:
        nn.quantize(layers, class_predicate=lambda path, module: _quantisation(path, module, tensors))
        layers.load_weights(list(tensors.items()), strict=True)
    except ValueError as error:
        raise LoadError(f"its MTP head can't be used: {error}") from error
    return MTPHead(model, layers)


def _check_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = {**config, **(config.get("text_config") or {})}
    if text.get("mtp_use_dedicated_embeddings"):
        raise LoadError("its MTP head has an embedding of its own, which is not supported")
    if text.get("mtp_num_hidden_layers", 1) > 1:
        raise LoadError(f"MTP heads of {text['mtp_num_hidden_layers']} layers are not supported")


def _tensors(folder: Path) -> Tensors:
    """Return all `mtp.` tensors of a checkpoint's files, without that prefix. Reads nothing else from disk."""
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else {}
    missing = {file for name, file in named.items() if _PREFIX.match(name) and not (folder / file).is_file()}
    if missing:
        raise LoadError(f"its MTP head is in {', '.join(sorted(missing))}, which is missing")
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):  # a head may also lie beside a converted model
        stored: Tensors = mx.load(str(file))  # type: ignore[assignment]
        tensors |= {_PREFIX.sub("", name): array for name, array in stored.items() if _PREFIX.match(name)}
    if not tensors:
        raise LoadError("its checkpoint holds no MTP head")
    return tensors


def normalise(tensors: Mapping[str, mx.array]) -> Tensors:
    """Return a head's tensors in the form of mlx-lm's modules: experts stacked, norms around 1."""
    stacked = _stack_experts(_split_experts(dict(tensors)))
    telling = [stacked[name] for kind in _TELLING_NORMS if (name := f"layers.0.{kind}.weight") in stacked]
    means = [float(np.array(norm.astype(mx.float32).mean())) for norm in telling]
    if not means or sum(means) / len(means) > 0.5:  # halfway between the two conventions
        return stacked
    return {name: array + 1.0 if array.ndim == 1 and "norm" in name else array for name, array in stacked.items()}


def _split_experts(tensors: Tensors) -> Tensors:
    """Split `experts.gate_up_proj` (E, 2 I, D) and `experts.down_proj` into `switch_mlp`'s three projections."""
    split: Tensors = {}
    for name, array in tensors.items():
        if name.endswith(".experts.gate_up_proj"):
            half, base = array.shape[-2] // 2, name.removesuffix("experts.gate_up_proj")
            split[f"{base}switch_mlp.gate_proj.weight"] = array[..., :half, :]
            split[f"{base}switch_mlp.up_proj.weight"] = array[..., half:, :]
        elif name.endswith(".experts.down_proj"):
            split[name.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = array
        else:
            split[name] = array
    return split


def _stack_experts(tensors: Tensors) -> Tensors:
    """Stack `experts.E.gate_proj.weight` over all experts E, with scales and biases."""
    experts: dict[str, dict[int, mx.array]] = {}
    stacked: Tensors = {}
    for name, array in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            stacked[name] = array
            continue
        base, number, projection, part = match.groups()
        experts.setdefault(f"{base.removesuffix('experts')}switch_mlp.{projection}.{part}", {})[int(number)] = array
    return stacked | {name: mx.stack([parts[e] for e in sorted(parts)]) for name, parts in experts.items()}


def _quantisation(path: str, module: nn.Module, tensors: Tensors) -> bool | dict[str, Any]:
    """Return how a module's weights are packed, from their shapes; False if they are not."""
    if f"{path}.scales" not in tensors or not hasattr(module, "to_quantized"):
        return False
    packed: dict[str, Any] = infer_quant_config(path, module, tensors)
    return packed
