"""Loads models from GGUF files: weights, configuration, tokenizer and chat template in one file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gguf import GGMLQuantizationType
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ...adapters.tokens.tokenizers import Made, Tokenizers, make_once
from .architectures import architecture_in, config_in
from .header import Header, read_header
from .repacked import Repacked
from .tokens import build_tokenizer
from .weights import GROUP, load_model, packed_bits

__all__ = ["describe_gguf", "is_gguf", "load_gguf"]


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, existing or not."""
    return path.suffix == ".gguf" or path.is_file()


def load_gguf(
    path: Path,
    *,
    dtype: mx.Dtype | None = None,
    pack: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    repacked: Path | None = None,
    tokenizers: Tokenizers | None = None,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Load model, tokenizer and configuration, as `mlx_lm.load` returns them for a folder.

    Args:
        dtype: of all floating-point arrays; None: the file's own.
        pack: keep quantised weights packed; else every weight becomes `dtype`.
        on_progress: called with the bytes of the tensors read so far, and of all tensors.
        repacked: folder that keeps the packed arrays of large files for later loads; None: none is kept.
        tokenizers: as in `make_once`.

    Raises:
        LoadError: the file is not GGUF, is broken, or can't be run; one line that names it.
        OSError: it can't be read.
    """
    header = read_header(path)
    name, architecture = architecture_in(header)
    config = config_in(header)
    tokenizer, settings = _tokenizer(header, name, config, tokenizers)
    config |= settings
    wanted = dtype or _own_dtype(header)
    kept = Repacked(repacked if pack else None, path, str(wanted))  # unpacked ones are converted as fast as read
    model = load_model(
        path, header, architecture, config, dtype=wanted, pack=pack, on_progress=on_progress, repacked=kept
    )
    return model, tokenizer, config


def _tokenizer(header: Header, name: str, config: dict[str, Any], tokenizers: Tokenizers | None) -> Made:
    sizes = config["vocab_size"], config["max_position_embeddings"]

    def make() -> Made:
        tokenizer, ends = build_tokenizer(header.metadata, name, *sizes)
        return tokenizer, {"eos_token_id": ends}

    parts = (item for item in header.metadata.items() if item[0].startswith("tokenizer.ggml."))
    return make_once(tokenizers, (name, *sizes, *parts), make)


def describe_gguf(path: Path, *, pack: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the configuration, and the number of elements of each type that `load_gguf` makes. Reads no tensor.

    Raises:
        LoadError, OSError: as of `load_gguf`.
    """
    header = read_header(path)
    floats = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}[_own_dtype(header)]
    counts = {"U8": 0, floats: 0}
    for info in header.tensors.values():
        size, bits = math.prod(info.shape), packed_bits(info.kind) if pack else None
        if bits is None:
            counts[floats] += size
        else:  # with a scale and a bias of two bytes for every group
            counts["U8"] += size // GROUP * (bits * GROUP // 8 + 4)
    return config_in(header), counts


def _own_dtype(header: Header) -> mx.Dtype:
    """Return the dtype of the file's matrices: float16 for packed ones, the dtype of their scales."""
    kinds = {info.kind for info in header.tensors.values() if len(info.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return mx.float32
    return mx.bfloat16 if kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.BF16} else mx.float16
