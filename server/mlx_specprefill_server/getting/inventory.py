"""What is on this machine: models in Hugging Face's cache and LM Studio's folders, packages, and pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from mlx_specprefill import Blueprint, LoadError, blueprint, describe_stored, lm_studio_folders, model_in, place_of
from mlx_specprefill import snapshot_of as snapshot

from ..packages import PackagedFile, PackageError, locate
from ..pairs import MissingPairError, PairsError, Row, find_pair

__all__ = ["PLACES", "Package", "StoredModel", "packages_of", "pair_state", "stored_models", "support"]

Place = Literal["hugging-face", "lm-studio"]
PLACES: dict[str, str] = {"hugging-face": "Hugging Face's cache", "lm-studio": "LM Studio's folder"}


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that others may have put there, too.

    Attributes:
        folder: of everything under the id; `path`: what is loaded, None if it isn't whole or is no model.
        nbytes: on disk.
    """

    id: str
    place: Place
    folder: Path
    path: Path | None
    nbytes: int

    def design(self) -> Blueprint | str:
        """Its architecture without sizes, or why nothing is known of it."""
        if self.path is None:
            return "it isn't whole, or holds no model that can be loaded"
        try:
            config, _ = describe_stored(self.path)
        except LoadError as error:
            return str(error)
        return blueprint(config, sizes=False)


def stored_models() -> Iterator[StoredModel]:
    """Those of the cache, then LM Studio's, each by its id; of several GGUF files in a folder each for itself."""
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        yield from _stored(repository, "hugging-face", folder, snapshot(repository))
    for models in lm_studio_folders():
        for folder in sorted(path for path in models.glob("*/*") if path.is_dir()):
            yield from _stored(f"{folder.parent.name}/{folder.name}", "lm-studio", folder, folder)


def _stored(repository: str, place: Place, folder: Path, files: Path | None) -> Iterator[StoredModel]:
    try:
        path = None if files is None else model_in(files)
    except LoadError:
        assert files is not None
        for file in sorted(files.glob("*.gguf")):
            yield StoredModel(f"{repository}/{file.name}", place, folder, file, file.stat().st_size)
        return
    yield StoredModel(repository, place, folder, path, _size_of(folder))


def _size_of(folder: Path) -> int:
    """Bytes of its files; links are to files that are counted where they lie."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def support(design: Blueprint | str) -> tuple[str, str | None]:
    """Whether sparse prefill is exact, in a word, and why not."""
    if isinstance(design, str):
        return "not loadable", design
    if design.refusal is not None:
        return "not loadable", design.refusal
    return ("exact", None) if design.sparse_refusal is None else ("full prefill only", design.sparse_refusal)


@dataclass(frozen=True, slots=True)
class Package:
    """A file of a Python package that a pair loads; `path` is None if it is not installed."""

    pair: str
    file: PackagedFile
    path: Path | None


def packages_of(rows: dict[str, Row]) -> Iterator[Package]:
    for pair, row in rows.items():
        for model in (row.target, row.draft):
            if isinstance(model, PackagedFile):
                yield Package(pair, model, _located(model))


def _located(file: PackagedFile) -> Path | None:
    try:
        return locate(file)
    except PackageError:
        return None


def pair_state(name: str, row: Row, file: Path | None = None) -> tuple[str, str | None]:
    """What can be said of a pair in a word, and what is wrong with it."""
    try:
        pair = find_pair(name, file)
    except MissingPairError:
        return ("not installed" if not isinstance(row.target, str) else "only in a clone"), None
    except PairsError as error:
        return "damaged", str(error)
    models = [model for model in (pair.target, pair.draft) if model not in (None, "self")]
    here = [place_of(model) for model in models if model is not None]
    return ("ready" if all(path is not None and path.exists() for path in here) else "from its repository"), None
