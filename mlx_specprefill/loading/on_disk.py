"""Finds models in folders, in Hugging Face's cache and in LM Studio's folder. Uses no network, and imports no MLX.

Hugging Face's cache holds `models--publisher--name/snapshots/COMMIT/files`, and `refs/main` names the commit. LM
Studio's folder holds `publisher/name/files`.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from ..errors import LoadError

REPACKED_FROM = "source"
"""Key of the GGUF file's path in a file of repacked weights."""
_LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")  # in the home folder; the second is of older versions
_LONGEST_HEADER = 1 << 26  # bytes
_PART = 4096  # bytes
_PARTS = 64  # of every file
_ID = re.compile(r"(?P<repository>[\w][\w.-]*/[\w][\w.-]*)(?:/(?P<file>[^/].*\.gguf))?", re.ASCII)


def is_repository_id(name: str) -> bool:
    """Return whether the name has the form `publisher/name` or `publisher/name/FILE.gguf`."""
    return _ID.fullmatch(name) is not None


def resolve_model_path(where: str | Path) -> Path | None:
    """Return the folder or GGUF file of this path, else of the stored model with this id; None if there is neither.

    Raises:
        LoadError: the repository has several GGUF files and none is named.
    """
    path = Path(where).expanduser()
    if path.exists() or str(where).startswith((".", "/", "~")):
        return path
    return find_model(str(where))


def find_model(name: str) -> Path | None:
    """Return the path of a repository id's files, if all that loading needs are there.

    Args:
        name: `publisher/name`, or `publisher/name/FILE.gguf`; the publisher may be left out if no two models are meant.

    Raises:
        LoadError: as in `resolve_model_path`, or two publishers' models have that name.
    """
    parts = _ID.fullmatch(name)
    if parts is None:
        named = {repository for repository, _ in stored_models() if repository.partition("/")[2] == name}
        if len(named) > 1:
            raise LoadError(f"several models are called {name}: {', '.join(sorted(named))}")
        return find_model(named.pop()) if named else None
    repository = parts["repository"]
    folders = [_snapshot_of(repository), *(Path.home() / place / repository for place in _LM_STUDIO)]
    found = (_model_in(folder, parts["file"]) for folder in folders if folder is not None and folder.is_dir())
    return next((model for model in found if model is not None), None)


def stored_models() -> Iterator[tuple[str, Path]]:
    """Yield the id and the folder of each model that Hugging Face's tools or LM Studio left here, complete or not."""
    for stored in sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*")):
        repository = stored.name.removeprefix("models--").replace("--", "/", 1)
        if (folder := _snapshot_of(repository)) is not None:
            yield repository, folder
    for place in _LM_STUDIO:
        for folder in sorted((Path.home() / place).glob("*/*")):
            if folder.is_dir():
                yield f"{folder.parent.name}/{folder.name}", folder


def _snapshot_of(repository: str) -> Path | None:
    """Return the folder of the commit of `main` at the last download, complete or not."""
    stored = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    try:
        commit = (stored / "refs" / constants.DEFAULT_REVISION).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    folder = stored / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def _model_in(folder: Path, file: str | None) -> Path | None:
    """Return the loadable model of a folder: the folder itself if all its weights are there, or a GGUF file in it.

    Raises:
        LoadError: as in `resolve_model_path`.
    """
    if file is not None:
        return folder / file if (folder / file).is_file() else None
    if (folder / "config.json").is_file() and _has_weights(folder):
        return folder
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise LoadError(f"{folder} has several GGUF files: name one of them after the id, as in ID/FILE.gguf: {names}")
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


def files_digest(path: Path) -> str:
    """Return a digest of a checkpoint's configuration and of samples of its weights."""
    digest = hashlib.blake2b(digest_size=16)
    for file in _loaded_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as content:
            for index in range(_PARTS):
                content.seek(index * size // _PARTS)
                digest.update(content.read(_PART))
    return digest.hexdigest()


def files_state(path: Path) -> str:
    """Return the same with the times of change, which differ on other machines: no changed file has the same.

    Reading 20 GB for it would take as long as what is saved by knowing the file.
    """
    return f"{files_digest(path)}, {[file.stat().st_mtime_ns for file in _loaded_files(path)]}"


def _loaded_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted([*path.glob("config.json"), *path.glob("*.safetensors")])


def repacked_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of repacked weights in a folder, and the path of the GGUF file that it was made from."""
    for file in sorted(folder.glob("*[0-9a-f].safetensors")):  # those that are not whole end in "part"
        try:
            with file.open("rb") as content:
                (length,) = struct.unpack("<Q", content.read(8))
                metadata = json.loads(content.read(min(length, _LONGEST_HEADER)))["__metadata__"]
            yield file, str(metadata[REPACKED_FROM])
        except (OSError, ValueError, KeyError, TypeError, struct.error):  # of a start that was interrupted
            continue
