"""Loads a model's arrays from a GGUF file: packed where MLX has the same packing, else through the gguf package."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import get_tensor_name_map
from gguf.quants import dequantize

from ...errors import LoadError
from .architectures import ROPE_FACTORS, Architecture
from .header import Header, TensorInfo, shown

__all__ = ["load_model", "packed"]

Array = npt.NDArray[Any]
GROUP = 32  # weights that share a scale: a block of GGUF, a group of MLX
PACKED_BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}
_SCALE = 2  # bytes of a float16


def load_model(
    path: Path,
    header: Header,
    architecture: Architecture,
    config: dict[str, Any],
    *,
    dtype: mx.Dtype,
    pack: bool,
    on_progress: Callable[[int, int], None],
) -> nn.Module:
    """Load mlx-lm's model from the file. Adds settings that only the tensors hold to `config`.

    Args:
        dtype: of all floating-point arrays, including the scales of packed weights.
        pack: keep weights packed where MLX can; else all become `dtype`.
        on_progress: as in `load_gguf`.

    Raises:
        LoadError: a tensor is missing, unknown, or of a shape that the configuration does not expect.
    """
    with path.open("rb") as file:
        config |= _rope_factors(header, architecture, config, file)
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
        stored = _stored(model, header, architecture, config)
        bits = _packable(model, stored) if pack else {}
        weights: dict[str, mx.array] = {}
        total, done = sum(info.nbytes for info in stored.values()), 0
        for name, info in stored.items():
            layer = name.removesuffix(".weight")
            arrays = packed(info, file) if layer in bits else {name.rpartition(".")[2]: _numbers(info, file)}
            for part, array in arrays.items():
                full = f"{name.rpartition('.')[0]}.{part}"
                weights[full] = _converted(name, array, architecture, config, dtype)
            done += info.nbytes
            on_progress(done, total)
    if bits:
        config["quantization"] = _quantization(bits)
    weights = model.sanitize(weights)
    packing = {layer: {"group_size": GROUP, "bits": count} for layer, count in bits.items()}
    nn.quantize(model, class_predicate=lambda layer, _: packing.get(layer, False))
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def packed(info: TensorInfo, file: BinaryIO) -> dict[str, Array]:
    """Repack blocks of 4 or 8 bits as MLX does: `weight` uint32, `scales` and `biases` float16, all (rows, ...).

    Nothing is decoded: a weight q of Q4_0 means (q - 8) d, of Q4_1 q d + m, of Q8_0 (q, signed) d; MLX's means q scale
    + bias. GGUF keeps the first half of a block in low bits and the second in high ones; MLX keeps the order.
    """
    blocks = info.read(file)
    rows, bits = blocks.shape[0], PACKED_BITS[info.kind]
    head = _SCALE * (2 if info.kind == Kind.Q4_1 else 1)
    blocks = blocks.reshape(rows, info.shape[1] // GROUP, head + GROUP * bits // 8)
    scales = np.ascontiguousarray(blocks[..., :_SCALE]).view(np.float16)[..., 0]
    if info.kind == Kind.Q4_1:
        biases = np.ascontiguousarray(blocks[..., _SCALE:head]).view(np.float16)[..., 0]
    else:
        biases = scales * np.float16(-(1 << (bits - 1)))
    values = blocks[..., head:]
    if bits == 8:
        values = values ^ np.uint8(0x80)
    else:
        ordered = np.concatenate([values & 0x0F, values >> 4], axis=-1)
        values = ordered[..., 0::2] | ordered[..., 1::2] << 4
    return {"weight": values.reshape(rows, -1).view(np.uint32), "scales": scales, "biases": biases}


def _numbers(info: TensorInfo, file: BinaryIO) -> Array:
    """Return a tensor's values, float32."""
    values: Array = dequantize(info.read(file), info.kind)
    return values.reshape(info.shape)


def _stored(
    model: nn.Module, header: Header, architecture: Architecture, config: dict[str, Any]
) -> dict[str, TensorInfo]:
    """Return the file's tensor of every parameter."""
    names = get_tensor_name_map(architecture.names, config["num_hidden_layers"])
    stored: dict[str, TensorInfo] = {}
    for name, array in nn.utils.tree_flatten(model.parameters()):
        if config["tie_word_embeddings"] and name.startswith("lm_head."):
            continue
        tensor = names.get_name(name, try_suffixes=(".weight", ".bias"))
        info = header.tensors.get(tensor or "")
        if info is None:
            raise LoadError(f"it has no tensor {tensor or name}")
        if info.shape != tuple(array.shape):
            raise LoadError(f"{tensor} has the shape {info.shape}, but {tuple(array.shape)} is needed")
        stored[name] = info
    used = {info.name for info in stored.values()} | ({ROPE_FACTORS} if architecture.interleaved else set())
    if unused := sorted(header.tensors.keys() - used):
        raise LoadError(f"tensor {shown(unused[0])} is no part of a {config['model_type']} model that can be run")
    return stored


def _packable(model: nn.Module, stored: dict[str, TensorInfo]) -> dict[str, int]:
    """Return the bits of each layer whose packed weight MLX can use."""
    modules = dict(model.named_modules())
    return {
        layer: PACKED_BITS[info.kind]
        for name, info in stored.items()
        if info.kind in PACKED_BITS and hasattr(modules[layer := name.removesuffix(".weight")], "to_quantized")
    }


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """Return the quantisation in config.json's form: the most common bits, and the layers that differ."""
    common = Counter(bits.values()).most_common(1)[0][0]
    others = {layer: {"group_size": GROUP, "bits": count} for layer, count in bits.items() if count != common}
    return {"group_size": GROUP, "bits": common, **others}


def _converted(
    name: str, array: Array, architecture: Architecture, config: dict[str, Any], dtype: mx.Dtype
) -> mx.array:
    """Return an array in the form of mlx-lm's module, in its own memory."""
    projection = name.rpartition(".")[0].rpartition(".")[2]
    if architecture.interleaved and projection in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if projection == "q_proj" else "num_key_value_heads"]
        array = array.reshape(heads, config["head_dim"] // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
    if projection.endswith("norm"):
        array = array - np.float32(architecture.norm_offset)
    made = mx.array(array)
    made = made if made.dtype == mx.uint32 else made.astype(dtype)
    mx.eval(made)  # one at a time: its source is freed before the next is read
    return made


def _rope_factors(header: Header, architecture: Architecture, config: dict[str, Any], file: BinaryIO) -> dict[str, Any]:
    """Convert Llama 3.1's scaling to the kind of mlx-lm that takes one factor per frequency, as llama.cpp stores it.

    That kind's own scaling by the ratio of two context lengths is off if both are equal.
    """
    info = header.tensors.get(ROPE_FACTORS)
    if info is None or not architecture.interleaved:
        return {}
    if info.shape != (config["head_dim"] // 2,):
        raise LoadError(f"{ROPE_FACTORS} has the shape {info.shape}, but {(config['head_dim'] // 2,)} is needed")
    factors = _numbers(info, file).tolist()
    length = config["max_position_embeddings"]
    kind = {"rope_type": "longrope", "original_max_position_embeddings": length}
    return {"rope_scaling": {**kind, "short_factor": factors, "long_factor": factors}}
