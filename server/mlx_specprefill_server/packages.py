"""Model files that come inside an installed Python package, found without importing it, and checked by SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MissingPackageError", "PackageError", "PackagedFile", "locate"]

# Hashing takes as long as reading the file, so what was checked is remembered by path, size and modification time.
CHECKED = Path.home() / ".cache/mlx-specprefill/checked.json"


class PackageError(ValueError):
    """The packaged file can't be used; the message is meant for the user."""


class MissingPackageError(PackageError):
    """The package is not installed, or in another version."""


class PackagedFile(BaseModel):
    """A file of an installed distribution: `package` as pip is told, `file` as the package lists it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    package: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*==[\w.+!-]+$")
    file: str = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def locate(wanted: PackagedFile) -> Path:
    """Where the file lies, after checking that it is the right one.

    Raises:
        MissingPackageError: the package is not installed in this version.
        PackageError: the file is not in it, or is not the expected one.
    """
    path = _find(wanted)
    if _checked(path) != wanted.sha256:
        raise PackageError(f"{path} is damaged or another file: its SHA-256 is not {wanted.sha256}")
    return path


def _find(wanted: PackagedFile) -> Path:
    name, _, version = wanted.package.partition("==")
    try:
        installed = distribution(name)
    except PackageNotFoundError as error:
        raise MissingPackageError(f"the package {wanted.package} is not installed") from error
    if installed.version != version:
        raise MissingPackageError(f"the package {wanted.package} is needed, version {installed.version} is installed")
    path = Path(str(installed.locate_file(wanted.file)))
    if wanted.file not in map(str, installed.files or ()) or not path.is_file():
        raise PackageError(f"the installed package {wanted.package} has no file {wanted.file}")
    return path.resolve()


def _checked(path: Path) -> str:
    """The file's SHA-256, from the last time if size and modification time are still the same."""
    state = path.stat()
    known = _read_checked()
    seen = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
    entry = known.get(str(path))
    if isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and {**entry, **seen} == entry:
        return str(entry["sha256"])
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _write_checked({**known, str(path): {**seen, "sha256": digest}})
    return digest


def _read_checked() -> dict[str, Any]:
    try:
        known = json.loads(CHECKED.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_checked(known: dict[str, Any]) -> None:
    """A cache that can't be written costs time, nothing else."""
    fresh = CHECKED.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        CHECKED.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(known), encoding="utf-8")
        fresh.replace(CHECKED)
