"""Configuration files on disk: changed by one atomic step, with a copy of what was there, and put back byte for byte.

A record per agent lies in the user's state folder: for each file its path, and beside the record the file as it was
before the change and as we wrote it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from .agents import File
from .files import Format, check, edited
from .undoing import without_ours
from .values import ConfigurationError

__all__ = ["Change", "forget", "planned", "restored", "state_folder", "write"]

_RECORD = "record.json"
_PRIVATE = 0o600  # files hold keys


@dataclass(frozen=True, slots=True)
class Change:
    """One file: as it is now, as it was or would be without us, and as it is to be. None: no such file."""

    path: Path
    format: Format
    now: bytes | None
    clean: bytes | None
    new: bytes | None

    @property
    def diff(self) -> str:
        """From now to what is to be; empty if nothing changes."""
        old, new = (_lines(content) for content in (self.now, self.new))
        name, other = (os.devnull if content is None else str(self.path) for content in (self.now, self.new))
        return "".join(unified_diff(old, new, name, other))


def state_folder(agent: str) -> Path:
    """Where the record of this agent's change is kept."""
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state).expanduser() if state else Path.home() / ".local" / "state"
    return base / "mlx-specprefill" / "connect" / agent


def planned(agent: str, files: Iterable[File]) -> list[Change]:
    """What `--write` would do. An earlier change of ours is taken back first, so that undoing leads to the beginning.

    Raises:
        ConfigurationError: a file can't be read or changed; names it.
    """
    earlier = {change.path: change for change in _recorded(agent)}
    return [_planned(file, earlier.get(_real(file.path))) for file in files]


def restored(agent: str, force: bool = False) -> list[Change]:
    """What `--undo` would do. What others have changed since stays, unless `force` puts back the whole file.

    Raises:
        ConfigurationError: nothing is recorded, or others have changed the same lines.
    """
    recorded = _recorded(agent)
    if not recorded:
        raise ConfigurationError(f"there is nothing to undo: no change is recorded in {state_folder(agent)}")
    return [_restored(change, state_folder(agent), force) for change in recorded]


def write(agent: str, changes: Iterable[Change]) -> None:
    """Records the changes, then makes them, each in one step."""
    changes = list(changes)
    _check_unchanged(changes)
    _record(agent, changes)
    for change in changes:
        _put(change.path, change.new)


def forget(agent: str, changes: Iterable[Change]) -> None:
    """Puts back what `restored` says, then drops the record."""
    changes = list(changes)
    _check_unchanged(changes)
    for change in changes:
        _put(change.path, change.new)
    shutil.rmtree(state_folder(agent))


def _check_unchanged(changes: Iterable[Change]) -> None:
    for change in changes:
        if _read(change.path) != change.now:
            raise ConfigurationError(f"{change.path} is being changed by another program; nothing was written")


def _planned(file: File, earlier: Change | None) -> Change:
    path = _real(file.path)
    with _naming(path):
        now = _read(path)
        clean = now if earlier is None else _clean(earlier, now)
        new = edited(_text(clean), file.values, file.format).encode()
    return Change(path, file.format, now, clean, new)


def _clean(earlier: Change, now: bytes | None) -> bytes | None:
    """What is there now, without what an earlier change of ours put there."""
    if now is None:
        return None
    if now in (earlier.new, earlier.clean):
        return earlier.clean
    found = without_ours(_text(earlier.clean), _text(earlier.new), _text(now))
    if found is None:
        raise ConfigurationError("it was changed where an earlier connect had changed it; run --undo --force first")
    check(found, earlier.format)
    return found.encode() if found or earlier.clean is not None else None


def _restored(earlier: Change, folder: Path, force: bool) -> Change:
    with _naming(earlier.path):
        now = _read(earlier.path)
        if force or now is None:
            return Change(earlier.path, earlier.format, now, earlier.clean, earlier.clean)
        try:
            clean = _clean(earlier, now)
        except ConfigurationError as error:
            raise ConfigurationError(
                "it was changed since, in the lines that connect wrote. --undo --force puts back the file as it was "
                f"before, which is kept in {folder}"
            ) from error
    return Change(earlier.path, earlier.format, now, clean, clean)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors about a file begin with its path."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{path} is left as it is: {error}") from error


def _recorded(agent: str) -> list[Change]:
    folder = state_folder(agent)
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ConfigurationError(f"{folder / _RECORD} can't be read: {error}") from error
    return [_recorded_change(folder, i, Path(one["path"]), one["format"]) for i, one in enumerate(record["files"])]


def _recorded_change(folder: Path, number: int, path: Path, format: Format) -> Change:
    before, ours = (_read(folder / f"{number}.{kind}") for kind in ("before", "written"))
    return Change(path, format, None, before, ours)


def _record(agent: str, changes: list[Change]) -> None:
    """The copies first: a record without them would be worth nothing."""
    folder = state_folder(agent)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number, change in enumerate(changes):
        _put(folder / f"{number}.before", change.clean)
        _put(folder / f"{number}.written", change.new)
    files = [{"path": str(change.path), "format": change.format} for change in changes]
    _put(folder / _RECORD, (json.dumps({"version": 1, "files": files}, indent=2) + "\n").encode())


def _real(path: Path) -> Path:
    """Where a link leads to: the link itself is to stay one."""
    return path.resolve()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _text(content: bytes | None) -> str:
    try:
        return "" if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError("it is no UTF-8 text") from error


def _lines(content: bytes | None) -> list[str]:
    text = "" if content is None else content.decode("utf-8", errors="replace")
    return [line if line.endswith("\n") else f"{line}\n" for line in text.splitlines(keepends=True)]


def _put(path: Path, content: bytes | None) -> None:
    """The whole file or none of it, with the mode of the one that was there."""
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o7777 if path.exists() else _PRIVATE
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise
