"""Models in Hugging Face's cache, by their repository ids. Asks no network.

The cache holds `models--publisher--name/snapshots/COMMIT/files`, and `refs/main` names the commit.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import constants, parse_local_safetensors_file_metadata
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.file_download import repo_folder_name
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from .adapters.gguf import describe_gguf, is_gguf
from .errors import LoadError

__all__ = [
    "LOADED_FILES",
    "describe_stored",
    "find_model",
    "is_repository_id",
    "place_of",
]

LOADED_FILES = tuple(DEFAULT_ALLOW_PATTERNS)
"""Patterns of the files in a repository that loading it takes."""

_ID = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(?:/(?P<file>[^/].*\.gguf))?", re.ASCII)


def is_repository_id(name: str) -> bool:
    """Whether it has the form `publisher/name` or `publisher/name/FILE.gguf`."""
    return _ID.fullmatch(name) is not None


def place_of(where: str | Path) -> Path | None:
    """The folder or GGUF file that is meant: the one of that path, else the stored model of that id; None without.

    Raises:
        LoadError: of several GGUF files in the repository none is named.
    """
    path = Path(where).expanduser()
    if path.exists() or str(where).startswith((".", "/", "~")):
        return path
    return find_model(str(where))


def find_model(name: str) -> Path | None:
    """Where the files of a repository id lie, if all that loading takes are there.

    Args:
        name: `publisher/name`, or `publisher/name/FILE.gguf`.

    Raises:
        LoadError: as in `place_of`.
    """
    parts = _ID.fullmatch(name)
    if parts is None:
        return None
    folder = _snapshot_of(parts["repository"])
    return None if folder is None else _model_in(folder, parts["file"])


def _snapshot_of(repository: str) -> Path | None:
    """The folder of the commit that `main` was when it was fetched last, whole or not."""
    stored = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    try:
        commit = (stored / "refs" / constants.DEFAULT_REVISION).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = stored / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _model_in(folder: Path, file: str | None) -> Path | None:
    """What can be loaded from a folder: itself, where every file of its weights is there, or a GGUF file in it.

    Raises:
        LoadError: as in `place_of`.
    """
    if file is not None:
        return folder / file if (folder / file).is_file() else None
    if (folder / "config.json").is_file() and _has_weights(folder):
        return folder
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise LoadError(f"{folder} has several GGUF files: name one of them behind the id, as in ID/FILE.gguf: {names}")
    return files[0] if files else None


def _has_weights(folder: Path) -> bool:
    index = folder / constants.SAFETENSORS_INDEX_FILE
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((folder / str(file)).is_file() for file in files)


def describe_stored(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """What config.json of a model's folder says, or its GGUF file, and how many elements of each type its weights have.

    Types are those of safetensors. Of the weights only the heads of their files are read.

    Raises:
        LoadError: a file is missing, broken, or of a kind that can't be loaded.
    """
    try:
        if is_gguf(path):  # the CPU backend has them unpacked
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
