"""Loads one model in pieces, so that others can use the device in between, or returns the loaded copy."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import load as mlx_load
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import hf_repo_to_path
from tokenizers import Tokenizer

from .adapters.checkpoint import dtype_name
from .adapters.gguf import is_gguf, load_gguf
from .adapters.overflow import FLOAT16_MAX, largest_hidden
from .adapters.sharding import DraftPlacement, Sharding, files_digest, shard
from .distributed.ranks import Ranks
from .errors import LoadError
from .stored import resolve_model_path

__all__ = [
    "DtypeName",
    "LoadedModels",
    "OnProgress",
    "Read",
    "cast_model",
    "read_model",
    "read_part",
    "read_placed",
]

log = logging.getLogger(__name__)
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_PIECE = 128 << 20  # bytes

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are in memory, and those of the whole model."""
Read = tuple[nn.Module, TokenizerWrapper, dict[str, Any]]


class LoadedModels:
    """Models in memory by their source: pairs with the same one share a copy. Keeps none alive.

    One thread only.
    """

    def __init__(self) -> None:
        self._models: dict[tuple[str, DtypeName], tuple[weakref.ref[nn.Module], TokenizerWrapper, dict[str, Any]]] = {}

    def holds(self, where: str | Path, dtype: DtypeName) -> bool:
        """Return whether the model is loaded. May be called from any thread."""
        kept = self._models.get((str(resolve_model_path(where) or where), dtype))
        return kept is not None and kept[0]() is not None

    def read(self, where: str | Path, dtype: DtypeName, on_progress: OnProgress) -> Read:
        """Load as `read_model`, unless it is loaded already."""
        key = (str(resolve_model_path(where) or where), dtype)
        if key in self._models:
            kept, tokenizer, config = self._models[key]
            if (model := kept()) is not None:
                return model, tokenizer, config
        model, tokenizer, config = read_model(where, dtype, on_progress)
        self._models[key] = (weakref.ref(model, lambda _: self._models.pop(key, None)), tokenizer, config)
        return model, tokenizer, config


def read_model(where: str | Path, dtype: DtypeName, on_progress: OnProgress) -> Read:
    """Load model, tokenizer and configuration of a folder, a GGUF file or a repository id, downloading it if necessary.

    Args:
        dtype: as in `load_pair`.

    Raises:
        LoadError: the checkpoint is missing or broken, or its hidden values overflow in float16.
    """
    path = resolve_model_path(where)
    if is_gguf(path or Path(where)):
        model, tokenizer, config = _read_gguf(path or Path(where), dtype, on_progress)
    else:
        with _errors(where):
            model, tokenizer, config = _lazy(where)
            cast_model(model, dtype)
            _fill(model, on_progress)
    _check_range(model, where)
    return model, tokenizer, config


def _check_range(model: nn.Module, where: str | Path) -> None:
    """Check the hidden values of a dozen tokens, if the model runs in float16.

    A dozen is enough: a text's first tokens have the largest values (SmolLM2-135M: 25 400, over long texts 25 600).

    Raises:
        LoadError: a hidden value overflows.
    """
    if dtype_name(model) != "float16":
        return
    with _errors(where):
        largest = largest_hidden(model)
    if largest > FLOAT16_MAX:
        raise LoadError(f"{where}: its hidden values overflow in float16: load it with --dtype bfloat16")
    if largest > FLOAT16_MAX / 2:
        log.warning(
            "%s: hidden values of %.0f, and float16 ends at %.0f: --dtype bfloat16 is safe", where, largest, FLOAT16_MAX
        )


def read_part(
    where: str | Path, dtype: DtypeName, on_progress: OnProgress, ranks: Ranks, kind: Sharding | None = None
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any], Sharding | None]:
    """Load this rank's part of a model without reading other weights; return it and its sharding.

    Args:
        kind: of sharding; None: mlx-lm's.

    Raises:
        LoadError: as for `read_model`; mlx-lm can't spread it over this number of ranks, or another rank has other
            files.
    """
    path = resolve_model_path(where)
    if is_gguf(path or Path(where)):
        raise LoadError(f"{where}: a GGUF file can't be spread over several machines; use the safetensors files")
    with _errors(where):
        model, tokenizer, config = _lazy(where)
        ranks.same("target" if kind is None else "draft", files_digest(path or hf_repo_to_path(str(where))))
        sharding = shard(model, str(where), config, ranks, kind)
        cast_model(model, dtype)
        _fill(model, on_progress)
    return model, tokenizer, config, sharding


def read_placed(
    draft: str | Path,
    read: Callable[[str | Path, DtypeName, OnProgress], Read],
    dtype: DtypeName,
    on_progress: OnProgress,
    ranks: Ranks,
    placement: DraftPlacement,
) -> tuple[nn.Module | None, TokenizerWrapper | None, dict[str, Any] | None]:
    """Return the draft on rank 0 and nothing on the others, or this rank's part of it."""
    if placement == "sharded":
        model, tokenizer, config, _ = read_part(draft, dtype, on_progress, ranks, "tensor")
        return model, tokenizer, config
    return read(draft, dtype, on_progress) if ranks.leads else (None, None, None)


@contextmanager
def _errors(where: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise LoadError(f"{where}: {error}") from error


def _lazy(where: str | Path) -> Read:
    """Return a model whose parameters are not read yet."""
    path = resolve_model_path(where)
    if path is None:
        log.info("%s is not in Hugging Face's cache: it is downloaded", where)
    elif not (path / "config.json").is_file():
        raise LoadError(f"{where}: no model here (config.json is missing)")
    model, tokenizer, config = mlx_load(str(path or where), return_config=True, lazy=True)
    if path is not None:
        _split_as_declared(tokenizer, path)
    return model, tokenizer, config


def _split_as_declared(tokenizer: TokenizerWrapper, folder: Path) -> None:
    """Split text as tokenizer.json says, if the folder names no other class.

    For some model types transformers applies its own rules, which give other tokens.
    """
    settings, file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    backend = getattr(tokenizer._tokenizer, "backend_tokenizer", None)
    if backend is None or not (settings.is_file() and file.is_file()):
        return
    if json.loads(settings.read_text()).get("tokenizer_class") == "PreTrainedTokenizerFast":
        declared = Tokenizer.from_file(str(file))
        if declared.pre_tokenizer is not None:
            backend.pre_tokenizer = declared.pre_tokenizer


def _fill(model: nn.Module, on_progress: OnProgress) -> None:
    """Read the parameters into memory."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    total, done = sum(int(array.nbytes) for array in arrays), 0
    for piece in _pieces(arrays):
        mx.eval(piece)
        done += sum(int(array.nbytes) for array in piece)
        on_progress(done, total)


def _pieces(arrays: list[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    for array in arrays:
        piece.append(array)
        if sum(int(one.nbytes) for one in piece) >= _PIECE:
            yield piece
            piece = []
    if piece:
        yield piece


def _read_gguf(path: Path, dtype: DtypeName, on_progress: OnProgress) -> Read:
    """Load a GGUF file. On the CPU backend packed weights are slower than float32 ones, so they stay packed only if a
    dtype is set.
    """
    unpacked = dtype == "auto" and _on_cpu()
    wanted = mx.float32 if unpacked else _DTYPES.get(dtype)
    try:
        return load_gguf(path, dtype=wanted, pack=not unpacked, on_progress=on_progress)
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from error
    except LoadError as error:
        raise LoadError(f"{path}: {error}") from error


def cast_model(model: nn.Module, dtype: DtypeName) -> None:
    """Cast the floating-point parameters as `load_pair` does."""
    if dtype == "auto" and not _on_cpu():
        return
    model.set_dtype(mx.float32 if dtype == "auto" else _DTYPES[dtype])


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))
