"""Models out of GGUF files: weights, configuration, tokenizer and chat template of one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from gguf import GGMLQuantizationType
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .architectures import architecture_in, config_in
from .header import Header, read_header
from .tokens import build_tokenizer
from .weights import load_model

__all__ = ["is_gguf", "load_gguf"]


def is_gguf(path: Path) -> bool:
    """Whether a path means a GGUF file, there or not."""
    return path.suffix == ".gguf" or path.is_file()


def load_gguf(
    path: Path,
    *,
    dtype: mx.Dtype | None = None,
    pack: bool = True,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """Model, tokenizer and configuration, as `mlx_lm.load` returns them for a folder.

    Args:
        dtype: of all floating-point arrays; None: the file's own.
        pack: keep Q4_0, Q4_1 and Q8_0 packed; else every weight becomes `dtype`.
        on_progress: gets the bytes of the file's tensors that are read, and those of all.

    Raises:
        LoadError: the file is not GGUF, broken, or holds what can't be run; one line that names it.
        OSError: it can't be read.
    """
    header = read_header(path)
    name, architecture = architecture_in(header)
    config = config_in(header)
    tokenizer, ends = build_tokenizer(header.metadata, name, config["vocab_size"], config["max_position_embeddings"])
    config["eos_token_id"] = ends
    wanted = dtype or _own_dtype(header)
    model = load_model(path, header, architecture, config, dtype=wanted, pack=pack, on_progress=on_progress)
    return model, tokenizer, config


def _own_dtype(header: Header) -> mx.Dtype:
    """What the file's matrices are: float16 where they are packed, for so are the scales."""
    kinds = {info.kind for info in header.tensors.values() if len(info.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return mx.float32
    return mx.bfloat16 if kinds <= {GGMLQuantizationType.F32, GGMLQuantizationType.BF16} else mx.float16
