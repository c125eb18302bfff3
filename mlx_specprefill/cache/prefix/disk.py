"""Prefixes on disk: writes, checks, reads and erases one file per record, within a limit of bytes.

One safetensors file per record, one sqlite index per folder. A file gets its own name once it is complete, and its row
after that. A record is served only if its checksum matches its row. The MLX thread turns arrays into bytes, one I/O
thread writes, and a few threads read. A failure of the folder costs cached work and a log line, never a request. The
index holds the prompts' tokens in plain form, so only the owner may read it.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import mlx.core as mx

from .identity import LABEL_MARK, label_of
from .index import DiskRow, RecordIndex, create_private, file_name, has_index
from .layout import Arrays

VERSION = 1
_FORMAT = "mlx-specprefill-prefix"
_READERS = 4  # threads; also the number of files read ahead
_PATIENCE_S = 0.01  # a step of a reading waits no longer for the disk
_DONE = b"done"  # any bytes

log = logging.getLogger(__name__)


def encode(arrays: Arrays, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file."""
    file = io.BytesIO()
    mx.save_safetensors(file, arrays, {"format": _FORMAT, "version": str(VERSION), **metadata})
    return file.getvalue()


def load(path: Path, metadata: Mapping[str, str]) -> Arrays:
    """Return the arrays of a file from `encode`.

    Raises:
        ValueError: it was made for another record, by another version, or not by us.
        RuntimeError: it can't be read, or is no safetensors file.
    """
    arrays: Arrays
    arrays, said = mx.load(str(path), return_metadata=True)  # type: ignore[assignment]
    if said != {"format": _FORMAT, "version": str(VERSION), **metadata}:
        raise ValueError(f"it belongs elsewhere: {said}")
    mx.eval(arrays)
    return arrays


class DiskTier:
    """A folder of records within a byte budget. Methods run on the MLX thread unless listed under another thread.

    Args:
        folder: made if missing. Several processes may share one; each sees the records from before its start.
        byte_limit: of all files together; the least recently used records make room.
        pending_limit: bytes waiting to be written; further records are refused.

    Attributes:
        evictions: records dropped to make room, by this process.
        nbytes: of all files, as last seen by this process.
        stamp: the time at which what is touched or written now counts as used.

    Raises:
        OSError: the folder can't be used.
    """

    def __init__(self, folder: Path, byte_limit: int, pending_limit: int = 1 << 29) -> None:
        self.folder = folder
        self.byte_limit = byte_limit
        self.evictions = 0
        self._index = RecordIndex(folder)
        self.nbytes = self._index.total()
        self._pending_limit = pending_limit
        self._pending_bytes = 0
        self._lock = threading.Lock()  # over _known, _pending_bytes, and evictions
        self._known = {key: _done(checksum) for key, checksum in self._index.known.items()}  # once it is written
        self._writer = ThreadPoolExecutor(1, "mlx-specprefill-cache-io")
        self._failing = False
        self._temporary = itertools.count()
        self.stamp = self._index.newest

    # -- MLX thread

    def has(self, key: str) -> bool:
        """Return whether a record is on disk or queued."""
        with self._lock:
            return key in self._known

    def begin(self) -> None:
        """Start a new look-up or store. All records touched until the next one count as used at the same time.

        So a block never looks older than its children, and never makes room for them.
        """
        self.stamp = max(time.time(), self.stamp + 1e-6)

    def rows(self, namespace: str) -> list[DiskRow]:
        """Return the rows that earlier processes wrote in a namespace, labelled or not; none if the index is broken."""
        self.flush()
        try:
            return self._index.rows(namespace, f"{namespace}{LABEL_MARK}*")
        except sqlite3.Error as error:
            log.warning("the index of %s can't be read: %s", self.folder, error)
            return []

    def has_room(self, nbytes: int) -> bool:
        """Return whether a record of so many bytes may join those that wait to be written."""
        with self._lock:
            return not self._pending_bytes or self._pending_bytes + nbytes <= self._pending_limit

    def write(self, row: DiskRow, arrays: Arrays, used: float | None = None) -> bool:
        """Copy the arrays and queue them for writing; return False if refused. A known key is not written again.

        Args:
            used: when it was used last; None: now.
        """
        data = encode(arrays, {"key": row.key, "namespace": row.namespace})
        with self._lock:
            if row.key in self._known:
                return True
            if len(data) > self.byte_limit or self._pending_bytes + len(data) > self._pending_limit:
                return False
            self._pending_bytes += len(data)
            self._known[row.key] = self._queue("write", self._write, row, data, self.stamp if used is None else used)
        return True

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
                    readers.submit(self._check, next_one) for next_one in keys[len(checks) : number + 1 + _READERS]
                ]
                while not wait([checks[number]], _PATIENCE_S).done:
                    yield
                found.append(self._load(key, checks[number], namespace))
                yield
            return found
        finally:
            readers.shutdown(wait=False, cancel_futures=True)

    def _check(self, key: str) -> bool:
        """Return whether there is such a record. Runs on a thread of `read`.

        Raises:
            OSError: its file can't be read.
            ValueError: its file has another checksum.
        """
        with self._lock:
            known = self._known.get(key)
        checksum = b"" if known is None else known.result()
        if checksum and file_checksum(self._path(key)) != checksum:
            raise ValueError("its checksum is wrong")
        return bool(checksum)

    def _load(self, key: str, checked: Future[bool], namespace: str) -> Arrays | None:
        try:
            if not checked.result():
                return None
            return load(self._path(key), {"key": key, "namespace": namespace})
        except (OSError, ValueError, RuntimeError) as error:
            log.warning("cached record %s is skipped: %s", file_name(key), error)
            self.remove([key])
            return None

    def touch(self, keys: Sequence[str], pinned: bool = False) -> None:
        """Mark these records and those that they need as used now; `pinned`: pin them."""
        if keys:
            self._queue("touch", self._index.touch, keys, self.stamp, pinned)

    def remove(self, keys: Sequence[str]) -> None:
        """Delete records; unknown keys have no effect."""
        with self._lock:
            found = [key for key in keys if self._known.pop(key, None) is not None]
        if found:
            self._queue("remove", self._delete, found)

    def forget(self, owner: str | None) -> Future[bytes]:
        """Delete an owner's records, of every model, or everybody's, and the traces of removed ones as `erase`."""
        return self._queue("forget prompts", self._forget, owner)

    def erase(self) -> Future[bytes]:
        """Leave no trace of removed records in the index. The result is empty if that failed."""
        return self._queue("forget prompts", self._erase)

    def flush(self) -> None:
        """Wait until all queued work is on disk."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write the queued records and stop. No other method may be called afterwards."""
        self._writer.shutdown()
        self._index.close()

    def _path(self, key: str) -> Path:
        return self.folder / file_name(key)

    def _queue(self, what: str, work: Callable[..., bytes | None], *given: object) -> Future[bytes]:
        return self._writer.submit(self._run, what, work, *given)

    # -- I/O thread

    def _run(self, what: str, work: Callable[..., bytes | None], *given: object) -> bytes:
        """Return the checksum of the record that was written, or nothing."""
        try:
            return work(*given) or b""
        except (sqlite3.Error, OSError) as error:
            level = logging.DEBUG if self._failing else logging.WARNING  # one warning per row of failures
            log.log(level, "the disk cache could not %s: %s", what, error)
            self._failing = True
        except Exception:
            log.exception("the disk cache failed")
        return b""

    def _write(self, row: DiskRow, data: bytes, used: float) -> bytes:
        """Write a record that is still wanted, if there is room; return its checksum, or nothing if it is dropped."""
        checksum = b""
        try:
            if self.has(row.key) and self._make_room(len(data), used):
                checksum = self._write_file(row, data, used)
            self._failing = False
            return checksum
        finally:
            with self._lock:
                self._pending_bytes -= len(data)
                if not checksum and self._known.pop(row.key, None) is not None:
                    self.evictions += 1

    def _write_file(self, row: DiskRow, data: bytes, used: float) -> bytes:
        """Write a record's file and row; return its checksum."""
        checksum = hashlib.sha256(data).digest()  # processors have instructions for it
        temporary = self.folder / f"{row.key}.{os.getpid()}-{next(self._temporary)}.tmp"
        try:
            with create_private(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish = partial(temporary.replace, self._path(row.key))
            self._index.add(row, len(data), checksum, used, publish)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.nbytes = self._index.total()
        return checksum

    def _make_room(self, nbytes: int, used: float) -> bool:
        """Delete records used before a time, that of a new record; return False if that isn't enough."""
        while (excess := self._index.total() + nbytes - self.byte_limit) > 0:
            victims = self._index.oldest(used, excess, self.byte_limit // 2)
            if not victims:
                return False
            with self._lock:  # first: a later request misses, or writes the record anew
                self.evictions += len(victims)
                for key in victims:
                    self._known.pop(key, None)
            self._delete(victims)
        return True

    def _forget(self, owner: str | None) -> bytes:
        keys = self._index.keys(lambda namespace: owner in (None, label_of(namespace).owner))
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
        self._delete(keys)
        return self._erase()

    def _erase(self) -> bytes:
        self._index.erase()
        return _DONE

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete the rows, then the files: a file without a row is removed at the next start, a row without a file is a
        miss.
        """
        self._index.remove(keys)
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        self.nbytes = self._index.total()


def forget_files(folder: Path, owner: str | None) -> None:
    """Delete an owner's prompts, or everybody's, from a folder of prefixes and those of its ranks.

    Raises:
        OSError: it can't be used, or they can't be deleted; the log says why.
    """
    for place in (folder, *folder.glob("rank-*-of-*")):
        if not has_index(place):
            continue
        tier = DiskTier(place, 0)
        try:
            if not tier.forget(owner).result():
                raise OSError(f"the prompts in {place} could not be deleted")
        finally:
            tier.close()


def _done(checksum: bytes) -> Future[bytes]:
    written = Future[bytes]()
    written.set_result(checksum)
    return written


def file_checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
