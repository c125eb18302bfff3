"""A repository of Hugging Face's hub, or of what HF_ENDPOINT names: which files a model takes, and what they hold."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.file_download import repo_folder_name

from mlx_specprefill import LOADED_FILES

__all__ = [
    "HubError",
    "RemoteFile",
    "Repository",
    "UnreachableHubError",
    "free_disk",
    "look_up",
    "repository_and_file",
    "talking_to",
]

_HEADERS_AT_ONCE = 8
_EXPECTED = (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    EntryNotFoundError,
    FileMetadataError,
    NotASafetensorsRepoError,
    SafetensorsParsingError,
    httpx2.TransportError,
)


class HubError(ValueError):
    """The hub does not give what is asked for; the message is meant for the user."""


class UnreachableHubError(HubError):
    """It can't be asked at all."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the hub lists it.

    Attributes:
        size: bytes.
        sha256: of a large file; None of a small one.
    """

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Repository:
    """The files of one commit that loading the model takes."""

    id: str
    commit: str
    files: tuple[RemoteFile, ...]

    @property
    def folder(self) -> Path:
        """Of this repository in the cache."""
        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.id, repo_type="model")

    @property
    def large(self) -> tuple[RemoteFile, ...]:
        """Those that come in parts; the hub has plain HTTP for files up to a limit only."""
        limit = constants.MAX_HTTP_DOWNLOAD_SIZE
        return tuple(file for file in self.files if file.sha256 is not None and file.size <= limit)

    def blob(self, file: RemoteFile) -> Path:
        """Where the cache has the content of a large file."""
        assert file.sha256 is not None
        return self.folder / "blobs" / file.sha256

    def partial(self, file: RemoteFile) -> Path:
        """Where what has come of it so far is kept; huggingface_hub takes files of this ending for unfinished ones."""
        return self.blob(file).with_name(f"{file.sha256}.mlx-specprefill.incomplete")

    @property
    def missing(self) -> int:
        """Bytes that are still to be fetched."""
        return sum(self.left(file) for file in self.files)

    def left(self, file: RemoteFile) -> int:
        """Bytes of it that are still to be fetched."""
        if (self.folder / "snapshots" / self.commit / file.name).exists():
            return 0
        if file.sha256 is None:
            return file.size
        if self.blob(file).exists():
            return 0
        partial = self.partial(file)
        return file.size - min(file.size, partial.stat().st_size if partial.exists() else 0)

    def config(self) -> dict[str, Any] | None:
        """What its config.json holds, which is fetched into the cache; None without one, as in a repository of GGUF."""
        if all(file.name != "config.json" for file in self.files):
            return None
        with talking_to(self.id):
            path = hf_hub_download(self.id, "config.json", revision=self.commit)
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise HubError(f"config.json of {self.id} can't be read: {error}") from error
        return found if isinstance(found, dict) else None

    def parameters(self) -> dict[str, int]:
        """How many elements of each type its weights have, from the heads of their files: 100 kB of each."""
        names = [file.name for file in self.files if file.name.endswith(".safetensors")]
        read = partial(HfApi().parse_safetensors_file_metadata, self.id, revision=self.commit)
        counts: dict[str, int] = {}
        with talking_to(self.id), ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            for head in pool.map(read, names):
                for kind, count in head.parameter_count.items():
                    counts[kind] = counts.get(kind, 0) + count
        return counts


def repository_and_file(name: str) -> tuple[str, str | None]:
    """The two parts of `publisher/name/FILE.gguf`; of any other name itself, and None."""
    publisher, *rest = name.split("/", 2)
    return (f"{publisher}/{rest[0]}", rest[1]) if len(rest) > 1 else (name, None)


def look_up(repository: str, file: str | None = None) -> Repository:
    """What the hub has under this id on its main branch.

    Args:
        file: a GGUF file, which is then all that is wanted.

    Raises:
        HubError: there is no such repository or file, access to it is denied, or it holds no model that can be loaded.
        UnreachableHubError: offline mode is on, or the hub does not answer.
    """
    with talking_to(repository):
        found = HfApi().model_info(repository, files_metadata=True)
    listed = [
        RemoteFile(entry.rfilename, entry.size or 0, _digest(entry.lfs.sha256) if entry.lfs else None)
        for entry in found.siblings or ()
    ]
    wanted = _wanted(listed, file)
    if not wanted:
        raise HubError(f"{repository} holds no model that can be loaded{_instead(repository, listed, file)}")
    assert found.sha is not None
    return Repository(repository, found.sha, tuple(wanted))


def _digest(stated: str) -> str | None:
    """It becomes the name of a file."""
    return stated if re.fullmatch("[0-9a-f]{64}", stated) else None


def _wanted(listed: list[RemoteFile], file: str | None) -> list[RemoteFile]:
    if file is not None:
        return [one for one in listed if one.name == file]
    found = [one for one in listed if any(fnmatch(one.name, pattern) for pattern in LOADED_FILES)]
    return found if any(one.name.endswith(".safetensors") for one in found) else []


def _instead(repository: str, listed: list[RemoteFile], file: str | None) -> str:
    names = [one.name for one in listed if one.name.endswith(".gguf")]
    lacks = f": it has no file {file}" if file else ""
    if not names:
        return lacks or ": it has neither model*.safetensors nor a GGUF file"
    return f"{lacks}; name one of its GGUF files, as in {repository}/{names[0]}: {', '.join(names)}"


@contextmanager
def talking_to(repository: str) -> Iterator[None]:
    """What the hub refuses, in the words of somebody who wants a model.

    Raises:
        HubError, UnreachableHubError: as of `look_up`.
    """
    try:
        yield
    except _EXPECTED as error:
        raise _in_words(repository, _first_of(error)) from error


def _first_of(error: Exception) -> Exception:
    """Where a file is neither on the hub nor in the cache, huggingface_hub says the latter: the former is its cause."""
    cause = error.__cause__
    return cause if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, _EXPECTED) else error


def _in_words(repository: str, error: Exception) -> HubError:
    hub = constants.ENDPOINT
    sign_in = "sign in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        page = f"{hub}/{repository}"
        return HubError(f"{repository} is gated: accept its conditions on its page, {page}, then {sign_in}")
    if isinstance(error, RepositoryNotFoundError):
        return HubError(
            f"{hub} has no model {repository}, or it is private: check the name; for a private one {sign_in}"
        )
    if isinstance(error, OfflineModeIsEnabled):
        return UnreachableHubError(f"{repository} is to be looked up at {hub}, but HF_HUB_OFFLINE is set: unset it")
    if isinstance(error, HfHubHTTPError):
        return HubError(_answered(repository, error))
    if isinstance(error, httpx2.TransportError):
        return UnreachableHubError(f"{hub} can't be reached: {error}; what was fetched so far is kept")
    return HubError(f"{repository} can't be read: {error}")


def _answered(repository: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    said = f": {error.server_message}" if error.server_message else ""
    hint = "; the token in HF_TOKEN or of `hf auth login` is refused, or none is there" if status in (401, 403) else ""
    return f"{constants.ENDPOINT} answers {status} for {repository}{said}{hint}"


def free_disk() -> tuple[Path, int]:
    """The cache's folder, and the bytes that are free there."""
    folder = Path(constants.HF_HUB_CACHE)
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return folder, shutil.disk_usage(nearest).free
