"""Loads one model in pieces, so that others can use the device: dtype, context, its part on several machines."""

from __future__ import annotations

import json
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import parse_local_safetensors_file_metadata, snapshot_download
from huggingface_hub.errors import SafetensorsParsingError, StrictDataclassError
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, hf_repo_to_path, load_config, load_model, load_tokenizer
from mlx_lm.utils import _get_classes as classes_of
from tokenizers import Tokenizer

from ..adapters.startup_checks import FLOAT16_MAX, largest_hidden
from ..adapters.tokens.tokenizers import Made, Tokenizers, make_once
from ..config import DtypeName
from ..distributed.ranks import Ranks
from ..errors import LoadError
from .gguf import describe_gguf, is_gguf, load_gguf
from .on_disk import files_digest, resolve_model_path
from .pieces import bring_into_memory
from .rope_names import check_rope_names, with_old_rope_names

Sharding = Literal["tensor", "pipeline"]  # every layer over all ranks, or some layers to each rank

_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.*", "tekken.json", "tokenization_*.py")
_SIZES = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
)
_NOT_MADE = (
    TypeError, AttributeError, IndexError, AssertionError, ZeroDivisionError, StrictDataclassError,
)  # fmt: skip
# A folder's tokens depend on the files with these endings, apart from the model's own, and on these of its settings.
_OF_TOKENS = frozenset((".json", ".jsonl", ".model", ".tiktoken", ".txt", ".py"))
_OF_MODELS = frozenset("config.json generation_config.json model.safetensors.index.json heads.json".split())
_NAMED = ("model_type", "tokenizer_class", "auto_map")
_TEMPLATE = "chat_template"
LOADED_FILES = tuple(DEFAULT_ALLOW_PATTERNS)
"""Patterns of the repository files that loading needs."""

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

log = logging.getLogger(__name__)
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_WITHOUT_BFLOAT16 = ("applegpu_g13", "applegpu_g14")
_LONGEST = 1 << 20  # tokens; models without positions state no limit, or 2^31 - 1

OnProgress = Callable[[int, int], None]
"""Called with the bytes that are in memory, and those of the whole model."""
Read = tuple[nn.Module, TokenizerWrapper, dict[str, Any]]


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def context_length(config: dict[str, Any], tokenizer: TokenizerWrapper | None) -> int:
    """Return the configured context, or the tokenizer's limit if that is smaller, in tokens. At most a million.

    YaRN multiplies the context that it was trained on, which `max_position_embeddings` does not have to contain. A
    tokenizer's limit below that one is the unscaled context.
    """
    known = _text_config(config)
    names = ("max_position_embeddings", "model_max_length", "max_seq_len", "seq_length", "n_positions", "n_ctx")
    limits = [known[name] for name in names if isinstance(known.get(name), int) and known[name] > 0]
    window = min(limits, default=_LONGEST)
    scaled = max(window, _yarn_context(known, window))
    stated = getattr(tokenizer, "model_max_length", None)
    if isinstance(stated, int) and stated > 0 and not stated <= window < scaled:
        scaled = min(scaled, stated)
    return min(scaled, _LONGEST)


def _yarn_context(config: dict[str, Any], window: int) -> int:
    """Return the context that YaRN makes, in tokens; 0 without it."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict) or "yarn" not in str(scaling.get("rope_type") or scaling.get("type")):
        return 0
    factor, trained = scaling.get("factor"), scaling.get("original_max_position_embeddings") or window
    if not isinstance(factor, int | float) or not isinstance(trained, int):
        return 0
    return int(factor * trained)


def vocab_size(config: dict[str, Any], tokenizer: TokenizerWrapper) -> int:
    """Return the rows of the output projection; at least the tokenizer's vocabulary."""
    stated = _text_config(config).get("vocab_size")
    return stated if isinstance(stated, int) and stated > 0 else len(tokenizer.get_vocab())


def dtype_name(model: nn.Module) -> str:
    sizes: dict[str, int] = {}
    for _, array in nn.utils.tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + int(array.size)
    return max(sizes, key=lambda name: sizes[name]) if sizes else "none"


def sharding_of(model: nn.Module) -> Sharding | None:
    """Return mlx-lm's way to spread the model; None if it has none."""
    if hasattr(model, "shard"):
        return "tensor"
    return "pipeline" if hasattr(getattr(model, "model", None), "pipeline") else None


def shard(model: nn.Module, name: str, config: dict[str, Any], group: Ranks) -> Sharding:
    """Reduce a model whose weights were not read yet to this rank's part.

    Raises:
        LoadError: mlx-lm can't spread it over this number of ranks.
    """
    kind = sharding_of(model)
    if kind is None:
        why = f"mlx-lm can't shard or pipeline {model.model_type}"
        raise LoadError(f"{name} can't be spread over several machines: {why}")
    try:
        if kind == "tensor":
            check_heads(name, config, group.size)
            model.shard(group.group)
        else:
            model.model.pipeline(group.group)
    except (ValueError, AssertionError, IndexError) as error:
        raise LoadError(f"{name} can't be spread over {group.size} ranks: {error}") from error
    return kind


def check_heads(name: str, config: dict[str, Any], size: int) -> None:
    """Check that head counts are divisible by the number of ranks. mlx-lm ignores the remainder.

    Raises:
        LoadError: there is a remainder.
    """
    text = config.get("text_config", config)
    for key in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        count = text.get(key)
        # A latent cache (MLA) is whole on every rank, whatever this number.
        if isinstance(count, int) and count % size and not (key == "num_key_value_heads" and "kv_lora_rank" in text):
            raise LoadError(f"{name} can't be spread over {size} ranks: its {count} {key} can't be divided by that")


def stated_sampling(where: str | Path) -> dict[str, Any]:
    """Return the sampling that a model's generation_config.json states, unchecked; empty if it does not sample."""
    try:
        file = (resolve_model_path(where) or Path(where)) / "generation_config.json"
        stated = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(stated, dict) or stated.get("do_sample") is False:
        return {}
    found = {name: stated[name] for name in _SAMPLING if stated.get(name) is not None}
    return {"temperature": 1.0, **found} if stated.get("do_sample") else found


def describe_stored(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the configuration of a model's folder or GGUF file, and the number of weights of each type.

    Types are those of safetensors. Reads only the headers of the weights' files.
    """
    try:
        if is_gguf(path):  # the CPU backend unpacks them
            return describe_gguf(path, pack=mx.default_device() != mx.Device(mx.cpu))
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        heads = [parse_local_safetensors_file_metadata(file) for file in path.glob("model*.safetensors")]
    except (OSError, ValueError, SafetensorsParsingError) as error:
        raise LoadError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path}: config.json holds no object")
    counts: Counter[str] = Counter()
    for head in heads:
        counts.update(head.parameter_count)
    return config, dict(counts)


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

    def read(self, where: str | Path, dtype: DtypeName, on_progress: OnProgress, repacked: Path | None = None) -> Read:
        """Load as `read_model`, unless it is loaded already."""
        key = (str(resolve_model_path(where) or where), dtype)
        if key in self._models:
            kept, tokenizer, config = self._models[key]
            if (model := kept()) is not None:
                return model, tokenizer, config
        model, tokenizer, config = read_model(where, dtype, on_progress, repacked)
        self._models[key] = (weakref.ref(model, lambda _: self._models.pop(key, None)), tokenizer, config)
        return model, tokenizer, config


def read_model(
    where: str | Path,
    dtype: DtypeName,
    on_progress: OnProgress,
    repacked: Path | None = None,
    tokenizers: Tokenizers | None = None,
) -> Read:
    """Load model, tokenizer and configuration of a folder, a GGUF file or a repository id, downloading it if necessary.

    Args:
        dtype, repacked: as in `load_pair`.
        tokenizers: as in `make_once`.

    Raises:
        LoadError: the checkpoint is missing or broken, or its hidden values overflow in float16.
    """
    path = resolve_model_path(where)
    if is_gguf(path or Path(where)):
        model, tokenizer, config = _read_gguf(path or Path(where), dtype, on_progress, repacked, tokenizers)
    else:
        with _errors(where):
            model, tokenizer, config = _lazy(where, tokenizers)
            cast_model(model, dtype)
            _fill(model, on_progress)
    if dtype == "auto" and _emulates_bfloat16():
        _prefer_float16(model, where)
    _check_range(model, where)
    return model, tokenizer, config


def _emulates_bfloat16() -> bool:
    """Return whether this GPU has float16, but no bfloat16 of its own: those of M1 and M2."""
    return not _on_cpu() and str(mx.device_info().get("architecture", "")).startswith(_WITHOUT_BFLOAT16)


def _prefer_float16(model: nn.Module, where: str | Path) -> None:
    """Cast bfloat16 to float16 where the hidden values of a dozen tokens are far from the end of its range.

    It is 1.2 to 1.7 times as fast there (mlx-examples issue 186, omlx issue 604, Rapid-MLX issue 3154).
    """
    if dtype_name(model) != "bfloat16":
        return
    with _errors(where):
        largest = largest_hidden(model)
    if largest >= FLOAT16_MAX / 2:
        log.info(
            "%s: hidden values of %.0f are too large for float16: bfloat16, which this GPU emulates", where, largest
        )
        return
    log.info("%s: float16 instead of bfloat16, which this GPU emulates; --dtype bfloat16 keeps it", where)
    to_float16(model)


def to_float16(model: nn.Module) -> None:
    """Cast parameters of bfloat16 to float16, piece by piece. Others keep their type."""
    model.set_dtype(mx.float16, lambda kind: bool(kind == mx.bfloat16))
    _fill(model, lambda done, total: None)


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
    where: str | Path, dtype: DtypeName, on_progress: OnProgress, ranks: Ranks
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any], Sharding | None]:
    """Load this rank's part of a target without reading other weights; return it and its sharding.

    Raises:
        LoadError: as for `read_model`; mlx-lm can't spread it over this number of ranks, or another rank has other
            files.
    """
    path = resolve_model_path(where)
    if is_gguf(path or Path(where)):
        raise LoadError(f"{where}: a GGUF file can't be spread over several machines; use the safetensors files")
    with _errors(where):
        model, tokenizer, config = _lazy(where, None)
        ranks.assert_equal("target", files_digest(path or hf_repo_to_path(str(where))))
        sharding = shard(model, str(where), config, ranks)
        cast_model(model, dtype)
        _fill(model, on_progress)
    return model, tokenizer, config, sharding


@contextmanager
def _errors(where: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, json.JSONDecodeError) as error:
        raise LoadError(f"{where}: {error}") from error


def _lazy(where: str | Path, tokenizers: Tokenizers | None) -> Read:
    """Return a model whose parameters are not read yet."""
    path = resolve_model_path(where)
    if path is None:
        log.info("%s is not in Hugging Face's cache: it is downloaded", where)
        path = Path(snapshot_download(str(where), allow_patterns=list(LOADED_FILES)))
    stated = _read_config(path, where)
    config = with_old_rope_names(stated)
    if not any(file for pattern in _TOKENIZERS for file in path.glob(pattern)):
        raise LoadError(f"{where}: no tokenizer here (tokenizer.json is missing)")
    model_class, _ = classes_of(config)
    check_rope_names(config, sys.modules[model_class.__module__])
    changed = {name: value for name, value in config.items() if name not in stated or stated[name] != value}
    try:
        model, config = load_model(path, lazy=True, model_config=changed)
        tokenizer, settings = _tokenizer(path, config, tokenizers)
    except _NOT_MADE as error:
        raise LoadError(f"{where}: {_why_not_made(stated, error)}") from error
    return model, tokenizer, config | settings


def _tokenizer(folder: Path, config: Mapping[str, Any], tokenizers: Tokenizers | None) -> Made:
    def make() -> Made:
        tokenizer = load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
        _split_as_declared(tokenizer, folder)
        return tokenizer, {}

    return make_once(tokenizers, chain(map(config.get, _NAMED), _of_tokens(folder)), make)


def _of_tokens(folder: Path) -> Iterator[tuple[Path, object]]:
    """Yield the files that decide on a folder's tokens, with their contents."""
    for file in sorted(folder.rglob("*")):
        if file.suffix not in _OF_TOKENS or file.name in _OF_MODELS or file.stem == _TEMPLATE:
            continue
        content: Any = file.read_bytes()
        if file.name == "tokenizer_config.json":
            content = {name: value for name, value in json.loads(content).items() if name != _TEMPLATE}
        yield file.relative_to(folder), content


def _read_config(folder: Path, where: str | Path) -> dict[str, Any]:
    """Return the contents of config.json, with the end tokens of generation_config.json."""
    if not (folder / "config.json").is_file():
        raise LoadError(f"{where}: no model here (config.json is missing)")
    try:
        config = load_config(folder)
    except (ValueError, TypeError) as error:
        raise LoadError(f"{folder / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{folder / 'config.json'}: it holds no object")
    if "model_type" not in config:
        raise LoadError(f"{where}: config.json states no model_type")
    return config


def _why_not_made(config: dict[str, Any], error: Exception) -> str:
    """Return why mlx-lm can't make a model of this configuration."""
    text = _text_config(config)
    empty = [name for name, value in text.items() if value is None and name in _SIZES]
    if empty:
        return f"config.json states no {' and no '.join(empty)}"
    missing = re.search(r"missing \d+ required .*?: (.*)", str(error))
    return (
        f"config.json states no {missing[1].replace(chr(39), '')}"
        if missing
        else f"mlx-lm can't make this model: {error}"
    )


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
    bring_into_memory([array for _, array in tree_flatten(model.parameters())], on_progress)


def _read_gguf(
    path: Path, dtype: DtypeName, on_progress: OnProgress, repacked: Path | None, tokenizers: Tokenizers | None
) -> Read:
    """Load a GGUF file. On the CPU backend packed weights are slower than float32 ones, so they stay packed only if a
    dtype is set.
    """
    unpacked = dtype == "auto" and _on_cpu()
    wanted = mx.float32 if unpacked else _DTYPES.get(dtype)
    try:
        return load_gguf(
            path,
            dtype=wanted,
            pack=not unpacked,
            on_progress=on_progress,
            repacked=repacked,
            tokenizers=tokenizers,
        )
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
