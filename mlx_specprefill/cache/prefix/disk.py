"""Prefixes on disk: one checked file per record, the oldest erased beyond a limit, a former version's at the start.

The folder is its own index. A record is one safetensors file, whose head says all that is known of it and proves it;
the file's time of change is the time of its last use, and pinned records lie in a subfolder. A file gets its own name
once it is complete. The MLX thread turns arrays into bytes, one I/O thread writes, and a few threads read. A failure of
the folder costs cached work and a log line, never a request. The files hold the prompts' tokens in plain form, so only
the owner may read them.
"""

from __future__ import annotations

import io
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..._files import make_unsaved
from .identity import LABEL_MARK, label_of
from .layout import Arrays
from .record_file import DiskRow, check, encode, load, read_row, seal

_FOLDER, _FILE = 0o700, 0o600
_RECORD = re.compile(r"[0-9a-f]+(-state)?\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]+(-state)?\.\d+-\d+\.tmp")
_PINNED = "pinned"  # folder of pinned records
_FORMER_INDEX = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")  # of versions whose records say less
_READERS = 4  # threads; also the number of files read ahead
_RECOUNT = 64  # writes after which the files of other processes are counted, too
_ABANDONED_S = 600  # a file that was not completed for so long is nobody's
_PATIENCE_S = 0.01  # a step of a reading waits no longer for the disk
_WRITTEN = Future[bool]()
_WRITTEN.set_result(True)

log = logging.getLogger(__name__)


class _File(NamedTuple):
    """A record's file; `used` in nanoseconds since the epoch."""

    key: str
    path: str
    used: int
    nbytes: int
    pinned: bool


class DiskTier:
    """A folder of records within a byte budget. Methods run on the MLX thread unless listed under another thread.

    Args:
        folder: made if missing, and closed to other users. Several processes may share one; each sees the records from
            before its start.
        byte_limit: of all files together; the least recently used records make room.
        pending_limit: bytes waiting to be written; further records are refused.

    Attributes:
        evictions: records dropped to make room, by this process.
        nbytes: of all files, as last seen by this process.
        stamp: the time at which what is touched or written now counts as used, in nanoseconds since the epoch.

    Raises:
        OSError: the folder can't be used.
    """

    def __init__(self, folder: Path, byte_limit: int, pending_limit: int = 1 << 29) -> None:
        self.folder = folder
        self.byte_limit = byte_limit
        self.evictions = 0
        if mended := make_private(folder) + make_private(folder / _PINNED):
            log.warning("%s holds prompts: what was open to others is closed now (%d files)", folder, mended)
        self.stamp = max((file.used for file in self._files()), default=0)
        self._clean()
        self._pending_limit = pending_limit
        self._pending_bytes = 0
        self._lock = threading.Lock()  # over _known, _pending_bytes, and evictions
        self._known: dict[str, Future[bool]] = {}  # whether it is there, once it is written
        self._moving = threading.Lock()  # while a file moves, or is opened
        self._writer = ThreadPoolExecutor(1, "mlx-specprefill-cache-io")
        self._failing = False
        self._told = False  # that the limit is too small
        self._writes = 0

    def _clean(self) -> None:
        """Delete what processes that ended and former versions have left."""
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # it was completed meanwhile
                age = time.time() - path.stat().st_mtime
                if age > _ABANDONED_S and _TEMPORARY.fullmatch(path.name) and path.is_file():
                    path.unlink()
        index = [self.folder / name for name in _FORMER_INDEX]
        if index[0].is_file():
            former = [file.path for file in self._files()]
            log.warning("%s is of a former version: its %d records are deleted", self.folder, len(former))
            self._unlink([*former, *index])

    # -- MLX thread

    def has(self, key: str) -> bool:
        """Return whether a record is on disk or queued."""
        with self._lock:
            return key in self._known

    def begin(self) -> None:
        """Start a new look-up or store. All records touched until the next one count as used at the same time."""
        self.stamp = max(time.time_ns(), self.stamp + 1)

    def rows(self, namespace: str) -> list[DiskRow]:
        """Return the records that earlier processes wrote in a namespace, labelled or not. They are known from now on,
        and not returned again.

        None are returned if the folder can't be read. Damaged ones are deleted.
        """
        self.flush()
        rows, damaged = list[DiskRow](), list[str]()
        try:
            for file in [file for file in self._files() if not self.has(file.key)]:
                row = _row_of(file)
                if row is not None and row.namespace.partition(LABEL_MARK)[0] == namespace:
                    rows.append(row)
                elif row is None and os.path.exists(file.path):  # else another process has moved or deleted it
                    damaged.append(file.path)
            if damaged:
                log.warning("%s: %d damaged records are deleted", self.folder, len(damaged))
                self._unlink(damaged)
        except OSError as error:
            log.warning("%s can't be read: %s", self.folder, error)
        with self._lock:
            self._known |= dict.fromkeys((row.key for row in rows), _WRITTEN)
        return rows

    def has_room(self, nbytes: int) -> bool:
        """Return whether a record of so many bytes may join those that wait to be written."""
        with self._lock:
            return not self._pending_bytes or self._pending_bytes + nbytes <= self._pending_limit

    def write(self, row: DiskRow, arrays: Arrays, used: int | None = None) -> bool:
        """Copy the arrays and queue them for writing; return False if refused. A known key is not written again.

        Args:
            used: the stamp of its last use; None: now.
        """
        file = encode(row, arrays)
        nbytes = file.getbuffer().nbytes
        with self._lock:
            if row.key in self._known:
                return True
            if nbytes > self.byte_limit:
                self._tell_too_small(nbytes)
            if nbytes > self.byte_limit or self._pending_bytes + nbytes > self._pending_limit:
                return False
            self._pending_bytes += nbytes
            self._known[row.key] = self._queue("write", self._write, row, file, self.stamp if used is None else used)
        return True

    def _tell_too_small(self, nbytes: int) -> None:
        if not self._told:
            small = "the disk limit of %d KiB is too small: a part of a prompt takes %d KiB, and is not kept"
            log.warning(small, self.byte_limit >> 10, nbytes >> 10)
        self._told = True

    def read(self, keys: Sequence[str], namespace: str) -> Generator[None, None, list[Arrays | None]]:
        """Return records' arrays in this order, bit for bit; None for a missing or corrupt record.

        Yields after each record, and while the disk is slower. A few threads check the next records meanwhile, at most
        one each. That brings their files into memory, where `load` finds them. Each waits until its record is written.
        """
        readers = ThreadPoolExecutor(_READERS, "mlx-specprefill-cache-read")
        try:
            found: list[Arrays | None] = []
            checks: list[Future[bool]] = []
            for number, key in enumerate(keys):
                checks += [
                    readers.submit(self._check, next_one, namespace)
                    for next_one in keys[len(checks) : number + 1 + _READERS]
                ]
                while not wait([checks[number]], _PATIENCE_S).done:
                    yield
                found.append(self._load(key, checks[number]))
                yield
            return found
        finally:
            readers.shutdown(wait=False, cancel_futures=True)

    def _check(self, key: str, namespace: str) -> bool:
        """Return whether there is such a record. Runs on a thread of `read`.

        Raises:
            OSError: its file can't be read.
            ValueError: its file is damaged, or holds another record.
        """
        with self._lock:
            known = self._known.get(key)
        if known is None or not known.result():
            return False
        with self._moving:
            file = self._path(key).open("rb")
        with file:
            check(file, key, namespace)
        return True

    def _load(self, key: str, checked: Future[bool]) -> Arrays | None:
        try:
            if not checked.result():
                return None
            with self._moving:
                return load(self._path(key))
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("cached record %s is skipped: %s", file_name(key), error)
            self.remove([key])
            return None

    def touch(self, keys: Mapping[str, bool]) -> None:
        """Mark records as used now, each before those that need it, and pin those whose value is true."""
        if keys:
            self._queue("touch", self._touch, keys, self.stamp)

    def remove(self, keys: Sequence[str]) -> None:
        """Delete records; unknown keys have no effect."""
        with self._lock:
            found = [key for key in keys if self._known.pop(key, None) is not None]
        if found:
            self._queue("remove", self._delete, found)

    def forget(self, owner: str | None) -> Future[bool]:
        """Delete an owner's records, of every model, or everybody's, and the traces of removed ones as `erase`."""
        return self._queue("forget prompts", self._forget, owner)

    def erase(self) -> Future[bool]:
        """Let no removed record come back. The result is False if that failed."""
        return self._queue("forget prompts", self._erase)

    def flush(self) -> None:
        """Wait until all queued work is on disk."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write the queued records and stop. No other method may be called afterwards."""
        self._writer.shutdown()

    # -- any thread

    def _path(self, key: str) -> Path:
        """Return the place of a record. It moves only while `_moving` is held."""
        pinned = self.folder / _PINNED / file_name(key)
        return pinned if pinned.exists() else self.folder / file_name(key)

    def _files(self) -> list[_File]:
        """Return the files of all records, and count their bytes. A use in the future is the oldest."""
        now, files = time.time_ns(), list[_File]()
        for place, pinned in ((self.folder, False), (self.folder / _PINNED, True)):
            with os.scandir(place) as entries:
                for entry in entries:
                    if _RECORD.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # another process may delete it
                            state = entry.stat()
                            used = state.st_mtime_ns if state.st_mtime_ns <= now else 0
                            key = entry.name.removesuffix(".safetensors")
                            files.append(_File(key, entry.path, used, state.st_size, pinned))
        self.nbytes = sum(file.nbytes for file in files)
        return files

    def _queue(self, what: str, work: Callable[..., bool | None], *given: object) -> Future[bool]:
        return self._writer.submit(self._run, what, work, *given)

    # -- I/O thread

    def _run(self, what: str, work: Callable[..., bool | None], *given: object) -> bool:
        """Return the result of the work, or False if it failed."""
        try:
            return bool(work(*given))
        except OSError as error:
            level = logging.DEBUG if self._failing else logging.WARNING  # one warning per row of failures
            log.log(level, "the disk cache could not %s: %s", what, error)
            self._failing = True
        except Exception:
            log.exception("the disk cache failed")
        return False

    def _write(self, row: DiskRow, file: io.BytesIO, stamp: int) -> bool:
        """Write a record that is still wanted, if there is room; return whether it is on disk."""
        written, nbytes = False, file.getbuffer().nbytes
        used = stamp - row.end - (not row.tokens)  # a state goes before its block, and a block before its parent
        try:
            if self.has(row.key) and self._make_room(nbytes, used):
                self._write_file(row, file, used)
                written = True
            self._failing = False
            return written
        finally:
            with self._lock:
                self._pending_bytes -= nbytes
                if not written and self._known.pop(row.key, None) is not None:
                    self.evictions += 1

    def _write_file(self, row: DiskRow, file: io.BytesIO, used: int) -> None:
        seal(file)
        temporary = self.folder / f"{row.key}.{os.getpid()}-{self._writes}.tmp"
        try:
            with create_private(temporary) as target:
                target.write(file.getbuffer())
                target.flush()
                os.fsync(target.fileno())
            os.utime(temporary, ns=(used, used))
            temporary.replace(self.folder / (_PINNED if row.pinned else "") / file_name(row.key))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.nbytes += file.getbuffer().nbytes

    def _touch(self, keys: Mapping[str, bool], stamp: int) -> None:
        for number, (key, pinned) in enumerate(keys.items()):
            path = self._path(key)
            with suppress(FileNotFoundError):  # it was evicted, or not written
                os.utime(path, ns=(stamp - number, stamp - number))
                if pinned:
                    with self._moving:
                        path.replace(self.folder / _PINNED / path.name)

    def _make_room(self, nbytes: int, used: int) -> bool:
        """Delete records used before a time, that of a new record; return False if that isn't enough.

        The least recently used go first. Pinned ones come last while they take at most half of the limit.
        """
        self._writes += 1
        if self.nbytes + nbytes <= self.byte_limit and self._writes % _RECOUNT:
            return True
        files = self._files()
        excess = self.nbytes + nbytes - self.byte_limit
        pinned_last = 2 * sum(file.nbytes for file in files if file.pinned) <= self.byte_limit
        victims = list[_File]()
        for file in sorted(files, key=lambda file: (file.pinned and pinned_last, file.used)):
            if excess <= 0:
                break
            if file.used < used:
                victims.append(file)
                excess -= file.nbytes
        with self._lock:  # first: a later request misses, or writes the record anew
            self.evictions += len(victims)
            for file in victims:
                self._known.pop(file.key, None)
        self._unlink([file.path for file in victims])
        return excess <= 0

    def _forget(self, owner: str | None) -> bool:
        """Delete an owner's files and those of which nobody can tell whose they are."""
        found = [file for file in self._files() if owner is None or _owner_of(file) in (None, owner)]
        with self._lock:
            for file in found:
                self._known.pop(file.key, None)
        self._unlink([*(file.path for file in found), *(self.folder / name for name in _FORMER_INDEX)])
        return self._erase()

    def _erase(self) -> bool:
        for place in (self.folder, self.folder / _PINNED):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return True

    def _delete(self, keys: Sequence[str]) -> None:
        self._unlink([self._path(key) for key in keys])

    def _unlink(self, paths: Iterable[Path | str]) -> None:
        for path in paths:
            with suppress(FileNotFoundError):
                nbytes = os.stat(path).st_size
                os.unlink(path)
                self.nbytes -= nbytes


def forget_files(folder: Path, owner: str | None) -> None:
    """Delete an owner's prompts, or everybody's, from a folder of prefixes and those of its ranks.

    Raises:
        OSError: it can't be used, or they can't be deleted; the log says why.
    """
    for place in (folder, *folder.glob("rank-*-of-*")):
        if not place.is_dir():
            continue
        tier = DiskTier(place, 0)
        try:
            if not tier.forget(owner).result():
                raise OSError(f"the prompts in {place} could not be deleted")
        finally:
            tier.close()


def make_private(folder: Path) -> int:
    """Make the folder if it is missing, and close it and our files in it, known by their names, to other users.

    Returns:
        The number of them, the folder included, that were open to others.

    Raises:
        OSError: the folder can't be made or closed, because it belongs to somebody else or is meant for everybody.
    """
    make_unsaved(folder, _FOLDER)
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} is not this user's alone, and prompts would lie in it; name another folder")
    with os.scandir(folder) as entries:
        files = [Path(e.path) for e in entries if _is_ours(e.name) and e.is_file(follow_symlinks=False)]
    mended = 0
    for path, mode in ((folder, _FOLDER), *((file, _FILE) for file in files)):
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
            mended += 1
    return mended


def create_private(path: Path) -> BinaryIO:
    """Open a new or emptied file for writing that only its owner can read, whatever the process's umask.

    Raises:
        OSError: as `open`.
    """
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, _FILE))


def file_name(key: str) -> str:
    return f"{key}.safetensors"


def _is_ours(name: str) -> bool:
    return name in _FORMER_INDEX or bool(_RECORD.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _row_of(file: _File) -> DiskRow | None:
    """Return what a file holds; None if it is damaged or can't be read."""
    try:
        with open(file.path, "rb") as content:
            row, _ = read_row(content)
    except (OSError, ValueError):
        return None
    return replace(row, pinned=file.pinned) if row.key == file.key else None


def _owner_of(file: _File) -> str | None:
    row = _row_of(file)
    return None if row is None else label_of(row.namespace).owner
