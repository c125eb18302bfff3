"""Loads a model's arrays from a GGUF file: in MLX's packing, or as numbers through the gguf package."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, get_tensor_name_map
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K, dequantize

from ...arrays import Floats
from ...errors import LoadError
from .architectures import ROPE_FACTORS, Architecture
from .header import Header, TensorInfo, shorten
from .repacked import Repacked

Bytes = npt.NDArray[np.uint8]
Places = dict[str, mx.array]
GROUP = 32  # weights that share a scale and a bias in MLX
EXACT_BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q4_K: 4, Kind.Q5_0: 5, Kind.Q5_1: 5, Kind.Q5_K: 5, Kind.Q8_0: 8}
_OTHER_BITS = 8  # of types with no exact form in MLX
_LOWER_HALVES = {  # of pairs of fields, by a field's bits
    8: np.uint64(0x00FF00FF00FF00FF),
    16: np.uint64(0x0000FFFF0000FFFF),
    32: np.uint64(0x00000000FFFFFFFF),
}
_PIECE = 1 << 16  # bytes of a tensor that one thread converts at once: its numbers stay in a core's cache
_ROUNDED = 1 << 24  # bytes of a tensor that MLX rounds at once
_MOST_THREADS = 8


def packed_bits(kind: Kind) -> int | None:
    """Return the bits per weight that MLX keeps of a quantised type; None for plain numbers."""
    return None if GGML_QUANT_SIZES[kind][0] == 1 else EXACT_BITS.get(kind, _OTHER_BITS)


def load_model(
    path: Path,
    header: Header,
    architecture: Architecture,
    config: dict[str, Any],
    *,
    dtype: mx.Dtype,
    pack: bool,
    on_progress: Callable[[int, int], None],
    repacked: Repacked,
) -> nn.Module:
    """Load mlx-lm's model from the file. Adds settings that only the tensors hold to `config`.

    Args:
        dtype: of all floating-point arrays, including the scales of packed weights.
        pack: keep the quantised matrices packed; else all become `dtype`.
        on_progress: as in `load_gguf`.
        repacked: the arrays, where an earlier load kept them.

    Raises:
        LoadError: a tensor is missing, unknown, or of a shape that the configuration does not expect.
    """
    with path.open("rb") as file:
        config |= _rope_factors(header, architecture, config, file)
        module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
        model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
        stored = _find_tensors(model, header, architecture, config)
        packing = _packing(model, stored) if pack else {}
        weights = repacked.read(on_progress)
        if weights is None:
            weights = dict(_converted(stored, file, architecture, config, packing, dtype, on_progress))
            repacked.keep(weights)
    if packing:
        config["quantization"] = packing
    weights = model.sanitize(weights)
    nn.quantize(model, class_predicate=lambda layer, _: packing.get(layer, False))
    model.eval()
    model.load_weights(list(weights.items()), strict=True)
    return model


def _converted(
    stored: Mapping[str, TensorInfo],
    file: BinaryIO,
    architecture: Architecture,
    config: dict[str, Any],
    packing: Mapping[str, object],
    dtype: mx.Dtype,
    on_progress: Callable[[int, int], None],
) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays of mlx-lm's module by name, one tensor after the other."""
    total, done = sum(info.nbytes for info in stored.values()), 0
    packed = [name.endswith(".weight") and name.removesuffix(".weight") in packing for name in stored]
    places = [_places(info, info.blocks, pack) for info, pack in zip(stored.values(), packed, strict=True)]
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        for index, (name, info) in enumerate(stored.items()):
            layer, _, part = name.rpartition(".")
            # Memory's first touch takes as long as a conversion: MLX clears the next tensor's while threads fill this.
            mx.async_eval(places[index : index + 2])  # type: ignore[no-untyped-call]
            arrays = read_arrays(info, file, pack=packed[index], threads=threads, places=places[index])
            places[index] = {}
            for kind, array in arrays.items():
                full = f"{layer}.{kind or part}"
                yield full, _convert(full, array, architecture, config, dtype)
            done += info.nbytes
            on_progress(done, total)


def read_arrays(
    info: TensorInfo, file: BinaryIO, *, pack: bool, threads: Executor | None = None, places: Places | None = None
) -> Places:
    """Return `weight`, `scales` and `biases` in MLX's packing, or a tensor's numbers by the name "".

    Packed weights are uint32, all others float32. MLX's weight q means q scale + bias. GGUF's means the same in the
    types of EXACT_BITS; others are rounded to 8 bits, a piece at a time.

    Args:
        places: from `_places`, for the whole tensor.
    """
    if not pack or info.kind in EXACT_BITS:
        arrays = _filled(info, file, 0, info.blocks, pack, threads, places)
    else:
        step = max(1, _ROUNDED // info.block_bytes)
        parts = [
            mx.quantize(
                _filled(info, file, at, min(at + step, info.blocks), False, threads)[""].reshape(-1, GROUP),
                GROUP,
                _OTHER_BITS,
            )
            for at in range(0, info.blocks, step)
        ]
        joined = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
        arrays = dict(zip(("weight", "scales", "biases"), joined, strict=True))
    return {name: array.reshape(*info.shape[:-1], -1) for name, array in arrays.items()}


def _places(info: TensorInfo, blocks: int, pack: bool) -> Places:
    """Return zeros, not computed yet, for what so many blocks become: (blocks, ...) each. None for types that MLX has
    no exact form of.
    """
    if pack and info.kind not in EXACT_BITS:
        return {}
    sample = (_pack if pack else _numbers)(np.zeros((1, info.block_bytes), np.uint8), info.kind)
    return {
        name: mx.zeros((blocks, each.shape[1]), mx.uint32 if each.dtype == np.uint32 else mx.float32)
        for name, each in sample.items()
    }


def _filled(
    info: TensorInfo,
    file: BinaryIO,
    first: int,
    last: int,
    pack: bool,
    threads: Executor | None,
    places: Places | None = None,
) -> Places:
    """Return the blocks from `first` to before `last`, converted: (blocks, ...) each.

    Threads write the numbers where MLX has them. They call numpy alone, which lets others run meanwhile.
    """
    convert = _pack if pack else _numbers
    arrays = places or _places(info, last - first, pack)
    mx.eval(arrays)
    views = {name: np.array(array, copy=False) for name, array in arrays.items()}
    step = max(1, _PIECE // info.block_bytes)

    def fill(begin: int, end: int) -> None:
        for at in range(begin, end, step):
            upto = min(at + step, end)
            for name, part in convert(info.read(file, first + at, first + upto), info.kind).items():
                views[name][at:upto] = part

    share = max(step, -(-(last - first) // _MOST_THREADS))
    begins = range(0, last - first, share)
    ends = [min(begin + share, last - first) for begin in begins]
    list(map(fill, begins, ends) if threads is None else threads.map(fill, begins, ends))
    return arrays


def _numbers(blocks: Bytes, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    # As one row: the gguf package converts sixteen rows at a time.
    return {"": dequantize(blocks.reshape(1, -1), kind).reshape(len(blocks), -1)}


def _pack(blocks: Bytes, kind: Kind) -> dict[str, npt.NDArray[Any]]:
    """Pack blocks of a type of EXACT_BITS as MLX does: `weight` uint32, `scales` and `biases` float32."""
    words = _words(_integers(blocks, kind), EXACT_BITS[kind]).reshape(len(blocks), -1)
    return {"weight": words, **_affine(blocks, kind)}


def _affine(blocks: Bytes, kind: Kind) -> dict[str, Floats]:
    """Return scale and bias of each group of the blocks, (blocks, groups) float32."""
    first, second = (blocks[:, at : at + 2].view(np.float16).astype(np.float32) for at in (0, 2))
    if kind in (Kind.Q4_K, Kind.Q5_K):
        factors, minima = Q4_K.get_scale_min(blocks[:, 4:16])
        return {"scales": first * factors, "biases": -second * minima}
    if kind in (Kind.Q4_1, Kind.Q5_1):
        return {"scales": first, "biases": second}
    return {"scales": first, "biases": -first * 2 ** (EXACT_BITS[kind] - 1)}


def _integers(blocks: Bytes, kind: Kind) -> Bytes:
    """Return the integers of the blocks, (blocks, block's size).

    The low four bits lie at the end of a block: those of one run of weights in a byte's low half, those of the next run
    in its high half. Before them lie the fifth bits.
    """
    if kind == Kind.Q8_0:
        return blocks[:, 2:] ^ np.uint8(0x80)  # signed to unsigned
    size = GGML_QUANT_SIZES[kind][0]
    low = blocks[:, -size // 2 :].reshape(len(blocks), -1, 1, min(size // 2, 32))
    integers: Bytes = (low >> np.array([[0], [4]], dtype=np.uint8) & np.uint8(15)).reshape(len(blocks), size)
    if EXACT_BITS[kind] == 5:
        high = np.unpackbits(blocks[:, -size // 2 - size // 8 : -size // 2], axis=1, bitorder="little")
        integers |= high.reshape(len(blocks), 32, -1).swapaxes(1, 2).reshape(len(blocks), size) << 4
    return integers


def _words(integers: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Return the integers without gaps, the first in the lowest bits."""
    eights = np.ascontiguousarray(integers).reshape(-1).view("<u8")
    for width, lower in _LOWER_HALVES.items():
        eights = eights & lower | (eights & ~lower) >> np.uint64(width * (8 - bits) // 8)
    return np.ascontiguousarray(eights.view(np.uint8).reshape(-1, 8)[:, :bits]).reshape(-1).view(np.uint32)


def _find_tensors(
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
        raise LoadError(f"tensor {shorten(unused[0])} is no part of a {config['model_type']} model that can be run")
    return stored


def _packing(model: nn.Module, stored: dict[str, TensorInfo]) -> dict[str, dict[str, int]]:
    """Return group size and bits of each layer whose weight stays packed, as config.json has them."""
    modules = dict(model.named_modules())
    bits_of = {name.removesuffix(".weight"): packed_bits(info.kind) for name, info in stored.items()}
    return {
        layer: {"group_size": GROUP, "bits": bits}
        for layer, bits in bits_of.items()
        if bits is not None and hasattr(modules.get(layer), "to_quantized")
    }


def _convert(
    name: str, array: mx.array, architecture: Architecture, config: dict[str, Any], dtype: mx.Dtype
) -> mx.array:
    """Return an array in the form of mlx-lm's module, in its own memory."""
    projection = name.rpartition(".")[0].rpartition(".")[2]
    if architecture.interleaved and projection in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if projection == "q_proj" else "num_key_value_heads"]
        array = array.reshape(heads, config["head_dim"] // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)
    if projection.endswith("norm"):
        array = array - architecture.norm_offset
    if array.dtype != mx.uint32:
        array = array.astype(dtype)
    mx.eval(array)  # one at a time: its source is freed before the next is read
    return array


def _rope_factors(header: Header, architecture: Architecture, config: dict[str, Any], file: BinaryIO) -> dict[str, Any]:
    """Convert Llama 3.1's scaling to the kind of mlx-lm that takes one factor per frequency, as llama.cpp stores it.

    That kind's own scaling by the ratio of two context lengths is off if both are equal.
    """
    info = header.tensors.get(ROPE_FACTORS)
    if info is None or not architecture.interleaved:
        return {}
    if info.shape != (config["head_dim"] // 2,):
        raise LoadError(f"{ROPE_FACTORS} has the shape {info.shape}, but {(config['head_dim'] // 2,)} is needed")
    factors = read_arrays(info, file, pack=False)[""].tolist()
    length = config["max_position_embeddings"]
    kind = {"rope_type": "longrope", "original_max_position_embeddings": length}
    return {"rope_scaling": {**kind, "short_factor": factors, "long_factor": factors}}
