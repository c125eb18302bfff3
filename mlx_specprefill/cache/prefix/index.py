"""The index of a folder of records: one sqlite row per file, and a lock that shows use by other processes."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from ..._files import make_unsaved

FOLDER, FILE = 0o700, 0o600
log = logging.getLogger(__name__)
_VERSION = 7  # of the rows, and of what the files hold: states of 6 and before may lack layers
_RECORD = re.compile(r"[0-9a-f]+(-state)?\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]+(-state)?\.\d+-\d+\.tmp")
_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_LOCK = "lock"
_COLUMNS = "key, namespace, parent, tokens, end, array_bytes, pinned, selection_key, positions"  # as in `DiskRow`
_MORE = "file_bytes, checksum, used"
_TYPES = (str, str, str, bytes, int, int, int, str | None, bytes, int, bytes, float)  # of both
_MOST_BYTES = 1 << 50  # of a file
_MOST_AHEAD_S = 86_400  # of our clock; a use beyond was not written by a clock
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    parent TEXT NOT NULL,
    tokens BLOB NOT NULL,
    selection_key TEXT,
    positions BLOB NOT NULL,
    end INTEGER NOT NULL,
    array_bytes INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    used REAL NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS by_use ON records (used, end DESC);
CREATE INDEX IF NOT EXISTS by_namespace ON records (namespace);
"""


def make_private(folder: Path, ours: Callable[[str], bool]) -> int:
    """Make the folder if it is missing, and close it and our files in it to other users.

    Args:
        ours: recognises our files by name; others are left unchanged.

    Returns:
        The number of them, the folder included, that were open to others.

    Raises:
        OSError: the folder can't be made or closed, because it belongs to somebody else or is meant for everybody.
    """
    make_unsaved(folder, FOLDER)
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} is not this user's alone, and prompts would lie in it; name another folder")
    with os.scandir(folder) as entries:
        files = [Path(e.path) for e in entries if ours(e.name) and e.is_file(follow_symlinks=False)]
    mended = 0
    for path, mode in ((folder, FOLDER), *((file, FILE) for file in files)):
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
            mended += 1
    return mended


def create_private(path: Path) -> BinaryIO:
    """Open a new or emptied file for writing that only its owner can read, whatever the process's umask.

    Raises:
        OSError: as `open`.
    """
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, FILE))


@dataclass(frozen=True, slots=True)
class DiskRow:
    """The index row of a record.

    Attributes:
        key: hexadecimal, unique over all namespaces; "-state" at its end marks a state.
        parent: the key of the block before it.
        tokens: its own token ids, little-endian int32; empty for a state.
        selection_key: of a sparse block, as text; None: it is dense, or a state.
        positions: of a sparse block, little-endian int32.
        end: tokens from the start of the prompt to its end.
        array_bytes: bytes of its arrays in memory.
        pinned: evicted last, while pinned records take at most half of the limit.
    """

    key: str
    namespace: str
    parent: str
    tokens: bytes
    end: int
    array_bytes: int
    pinned: bool = False
    selection_key: str | None = None
    positions: bytes = b""


def file_name(key: str) -> str:
    return f"{key}.safetensors"


def has_index(folder: Path) -> bool:
    return (folder / _FILES[0]).is_file()


class UnreadableIndexError(OSError):
    """A file in the folder can't be used, though the folder could be."""


class RecordIndex:
    """May be opened by several processes. All methods raise sqlite3.Error.

    Args:
        folder: made if missing, and closed to other users.

    Attributes:
        known: the checksum of every record that has a row and a file, by key, as of the opening.
        newest: time of the last use of a record.

    Raises:
        UnreadableIndexError: what lies in the folder can't be used.
        OSError: the folder can't be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        mended, lock = make_private(folder, lambda _: False), None
        try:
            mended += make_private(folder, _is_ours)
            self._lock_file = lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            alone = self._try_lock()
            self.known, self.newest = self._open(alone)
        except (sqlite3.Error, UnicodeError, OSError) as error:
            if lock is not None:
                os.close(lock)
            of_folder = isinstance(error, OSError) and not isinstance(error, IsADirectoryError | PermissionError)
            kind = OSError if of_folder else UnreadableIndexError
            raise kind(f"the index of {folder} can't be used: {error}") from error
        if mended:
            log.warning("%s holds prompts: what was open to others is closed now (%d files)", folder, mended)
        if alone:
            fcntl.flock(self._lock_file, fcntl.LOCK_SH)

    def rows(self, namespace: str, pattern: str) -> list[DiskRow]:
        """Return the rows of a namespace, and of those that match the pattern."""
        query = f"SELECT {_COLUMNS} FROM records WHERE namespace = ? OR namespace GLOB ?"
        with self._database:
            return [DiskRow(*row) for row in self._database.execute(query, (namespace, pattern)) if _is_sound(row)]

    def add(self, row: DiskRow, file_bytes: int, checksum: bytes, used: float, publish: Callable[[], object]) -> None:
        """Add a row, and `publish` its file. Other processes see both or neither."""
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            publish()
            self._database.execute(
                f"INSERT OR REPLACE INTO records ({_COLUMNS}, {_MORE}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*astuple(row), file_bytes, checksum, used),
            )

    def touch(self, keys: Iterable[str], used: float, pinned: bool = False) -> None:
        """Mark records as used; `pinned`: pin them."""
        with self._database:
            rows = [(used, int(pinned), key) for key in keys]
            self._database.executemany("UPDATE records SET used = ?, pinned = MAX(pinned, ?) WHERE key = ?", rows)

    def remove(self, keys: Iterable[str]) -> None:
        with self._database:
            self._database.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])

    def keys(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return the records of the namespaces that are wanted."""
        found = self._database.execute("SELECT key, namespace FROM records").fetchall()
        return [key for key, namespace in found if wanted(namespace)]

    def erase(self) -> None:
        """Leave no byte of removed rows in the database and its log, whose free pages would keep them."""
        self._database.execute("VACUUM")
        (busy, _, _) = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise sqlite3.OperationalError("another process does not let go of the index")

    def oldest(self, before: float, nbytes: int, most_pinned: int = 0) -> list[str]:
        """Return records used before a time, least recently used first: files of `nbytes`, or fewer of 64.

        Pinned records come last while they take at most `most_pinned` bytes.
        """
        order = "used, end DESC, key DESC"
        if self.total("WHERE pinned") <= most_pinned:
            order = f"pinned, {order}"
        query = f"SELECT key, file_bytes FROM records WHERE used < ? ORDER BY {order} LIMIT 64"
        victims: list[str] = []
        for key, file_bytes in self._database.execute(query, (before,)).fetchall():
            if nbytes <= 0:
                break
            victims.append(key)
            nbytes -= file_bytes
        return victims

    def total(self, those: str = "") -> int:
        """Return the bytes of all files, or of those that meet a condition."""
        (total,) = self._database.execute(f"SELECT COALESCE(SUM(file_bytes), 0) FROM records {those}").fetchone()
        return int(total)

    def close(self) -> None:
        self._database.close()
        os.close(self._lock_file)

    def _try_lock(self) -> bool:
        """Return whether no other process uses the folder. The lock ends with the process."""
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_SH)
            except OSError as error:  # some network file systems have no locks
                log.warning("%s can't be locked: %s", self.folder, error)
            return False

    def _open(self, alone: bool) -> tuple[dict[str, bytes], float]:
        """Open the database and read it. A broken one, or one of another version, is replaced if no other process uses
        it.
        """
        try:
            return self._read(alone)
        except (sqlite3.DatabaseError, UnicodeError) as error:
            if not alone:
                raise
            log.warning("the index of %s starts empty: %s", self.folder, error)
        for name in _FILES:
            (self.folder / name).unlink(missing_ok=True)
        return self._read(alone)

    def _read(self, alone: bool) -> tuple[dict[str, bytes], float]:
        self._database = self._connect()
        try:
            return self._load(alone)
        except BaseException:
            self._database.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        index = self.folder / _FILES[0]
        os.close(os.open(index, os.O_RDWR | os.O_CREAT, 0o600))  # sqlite gives its other files this one's permissions
        database = sqlite3.connect(index, timeout=5.0, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA temp_store = MEMORY")  # no other file gets the tokens
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if tables and version != _VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, not {_VERSION}")
            if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            database.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")
        except BaseException:
            database.close()
            raise
        return database

    def _load(self, alone: bool) -> tuple[dict[str, bytes], float]:
        """Return checksums of complete records, and the time of the last use. Without other users, make folder and
        index agree first.
        """
        files = {path.name for path in self.folder.iterdir()}
        known, lost, newest, damaged = dict[str, bytes](), list[str](), 0.0, 0
        latest = time.time() + _MOST_AHEAD_S
        for row in self._database.execute(f"SELECT {_COLUMNS}, {_MORE} FROM records"):
            key, array_bytes = row[0], row[5]
            file_bytes, checksum, used = row[-3:]
            sound = _is_sound(row) and 0 <= array_bytes <= file_bytes <= _MOST_BYTES and 0 <= used <= latest
            damaged += not sound
            if sound and file_name(key) in files:
                known[key], newest = checksum, max(newest, used)
            else:
                lost.append(key)
        if damaged:
            log.warning("%s: %d damaged rows of the index are left out", self.folder, damaged)
        if alone:
            self._reconcile(files, known, lost)
        return known, newest

    def _reconcile(self, files: set[str], known: dict[str, bytes], lost: Sequence[str]) -> None:
        self.remove(lost)
        orphans = [name for name in files if _RECORD.fullmatch(name) and name.removesuffix(".safetensors") not in known]
        for name in [*orphans, *(name for name in files if _TEMPORARY.fullmatch(name))]:
            if not (self.folder / name).is_dir():
                (self.folder / name).unlink(missing_ok=True)
        if lost or orphans:
            log.info("%s: %d rows without file, %d files without row dropped", self.folder, len(lost), len(orphans))


def _is_sound(row: Sequence[object]) -> bool:
    """Return whether the values have their columns' types. sqlite checks neither these nor the bits."""
    return all(map(isinstance, row, _TYPES))


def _is_ours(name: str) -> bool:
    return name in (*_FILES, _LOCK) or bool(_RECORD.fullmatch(name) or _TEMPORARY.fullmatch(name))
