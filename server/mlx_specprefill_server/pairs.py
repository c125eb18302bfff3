"""Named model pairs from a `pairs.toml`, and model files inside Python packages.

Files of packages are found without an import, and checked by SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from difflib import get_close_matches
from importlib.metadata import distributions
from pathlib import Path, PurePath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from mlx_specprefill import DtypeName, LoadError, RuleName, resolve_model_path

# In a clone a link to models/pairs.toml, so that the folders beside that file are found; in a wheel a copy of it.
NAMED_PAIRS = Path(__file__).with_name("pairs.toml").resolve()


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


def size(count: int) -> str:
    """Return bytes in words."""
    return f"{count / 2**30:.1f} GB" if count >= 1 << 30 else f"{count / 2**20:.1f} MB"


def short_name(model: str) -> str:
    """Return a repository id unchanged, or the last part of a path of this machine."""
    is_id = re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) is not None and not Path(model).exists()
    return model if is_id else PurePath(model).name


class PairsError(ValueError):
    """The pairs file is missing or malformed, or lacks the pair. The message is meant for the user."""


class MissingPairError(PairsError):
    """The pair is known, but its models are not on this machine."""


class Described(BaseModel):
    """Options of a pair beside its models.

    `alias` is the id that clients see, `draft_heads` a file of retrieval heads on the draft's first layers, which alone
    are run then, `local` a folder whose target.gguf and draft.gguf are taken instead of the row's models, if both are
    there.
    `estimates` is a file with the map for tokens that are not read, or "off": nothing is estimated.
    `dtype`, `rule` and `template_kwargs` are those of the options, `context` the tokens of prompt and answer at most.

    Among several models in one server: `aliases` are further ids, `memory_share` how much of the memory limit it may
    use, `pin` keeps it in memory, and `ttl` are seconds without a request after which it is unloaded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    draft_heads: str | None = None
    estimates: str | None = None
    local: str | None = None
    threshold: int | None = Field(default=None, ge=0)
    keep_pct: Annotated[float, Field(gt=0, le=1)] | None = None
    alias: str | None = None
    aliases: list[str] = Field(default_factory=list)
    dtype: DtypeName = "auto"
    context: int | None = Field(default=None, ge=1)
    rule: RuleName | None = None
    template_kwargs: dict[str, Any] | None = None
    memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    pin: bool = False
    ttl: Annotated[float, Field(gt=0)] | None = None
    note: str = ""


def _kind(value: Any) -> str:
    return "package" if isinstance(value, dict | PackagedFile) else "name"


Model = Annotated[Annotated[str, Tag("name")] | Annotated[PackagedFile, Tag("package")], Discriminator(_kind)]


class Row(Described):
    """A row of the file. Each model is a folder, a repository id, or a file of an installed package.

    The draft can also be "self": the target's own layers.
    """

    target: Model
    draft: Model | None = None


class Pair(Described):
    """A pair that can be loaded. `target` and `draft` are folders, files or repository ids, or the draft is "self"."""

    target: str
    draft: str | None = None


def models_file() -> Path:
    """Return the path of the default table of several models."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "mlx-specprefill" / "models.toml"


def find_pair(name: str, file: Path | None = None) -> Pair:
    """Return the pair of that name with the paths of its packaged files.

    Raises:
        MissingPairError: its package is not installed, or it is part of a clone and this is none.
        PairsError: no such file, no such pair, or a row that can't be understood.
    """
    return resolve_pair(name, find_row(name, file), file)


def resolve_pair(name: str, row: Row, file: Path | None = None) -> Pair:
    """Return the pair of a row with the paths of its packaged files; raises MissingPairError as `find_pair`."""
    try:
        target, draft = _model_path(row.target), None if row.draft is None else _model_path(row.draft)
    except PackageError as error:
        raise MissingPairError(f"pair {name!r}: {error}; `mlx-specprefill pull {name}` fetches it") from error
    if file is None and Path(target).is_absolute() and not Path(target).exists():
        raise MissingPairError(
            f"pair {name!r} is part of a clone of the repository, not of this installation. "
            "Give another --pair, --target and --draft, or your own file with --pairs-file."
        )
    return Pair.model_validate(
        {"alias": name, **row.model_dump(exclude_defaults=True), "target": target, "draft": draft}
    )


def pair_state(name: str, row: Row, file: Path | None = None) -> str:
    """Return in a word whether a pair can be served from this machine's files."""
    try:
        pair = resolve_pair(name, row, file)
        models = [model for model in (pair.target, pair.draft) if model not in (None, "self")]
        here = [resolve_model_path(model) for model in models if model is not None]
    except MissingPairError:
        return "only in a clone" if isinstance(row.target, str) else "not installed"
    except LoadError as error:
        return str(error)
    return "ready" if all(place is not None and place.exists() for place in here) else "from its repository"


def find_row(name: str, file: Path | None = None) -> Row:
    """Return the row of that name, whether its models are on this machine or not.

    Raises:
        PairsError: no such file, no such pair, or a row that can't be understood.
    """
    rows = read_pairs(file or NAMED_PAIRS)
    if name not in rows:
        near = "".join(f"did you mean {other}? " for other in get_close_matches(name, rows, 1))
        where = "" if file is None else f" in {file}"
        raise PairsError(f"no pair {name!r}{where}: {near}there are: {', '.join(rows) or 'none'}")
    return rows[name]


def read_pairs(path: Path) -> dict[str, Row]:
    """Return every pair of the file in order. Folders are relative to the file.

    Raises:
        PairsError: no such file, or a row that can't be understood.
    """
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PairsError(f"can't read {path}: {error}") from error
    return {name: _row(name, row, path) for name, row in rows.items()}


def read_table(file: Path) -> dict[str, Row]:
    """Return the rows of a table by name.

    Raises:
        PairsError: no such file, no model in it, or a row that can't be understood.
    """
    rows = read_pairs(file)
    if not rows:
        raise PairsError(f"{file} names no model")
    return rows


def _row(name: str, values: Any, path: Path) -> Row:
    try:
        row = Row.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise PairsError(f"{path}: {where}: {first['msg']}") from error
    files = {name: getattr(row, name) for name in ("target", "draft", "draft_heads", "estimates", "local")}
    row = row.model_copy(update={name: _beside(path, file) for name, file in files.items() if file is not None})
    if row.local is None:
        return row
    target, draft = Path(row.local, "target.gguf"), Path(row.local, "draft.gguf")
    here = target.is_file() and draft.is_file()
    return row.model_copy(update={"target": str(target), "draft": str(draft)}) if here else row


def _beside(path: Path, model: str | PackagedFile) -> str | PackagedFile:
    if isinstance(model, str) and model.startswith("./"):
        return str((path.parent / model).resolve())
    return str(Path(model).expanduser()) if isinstance(model, str) and model.startswith("~/") else model


def _model_path(model: str | PackagedFile) -> str:
    return model if isinstance(model, str) else str(locate(model))
