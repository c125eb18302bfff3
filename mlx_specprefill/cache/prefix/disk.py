"""Stored arrays in files, with an index, that survive a restart.

One safetensors file per record, one sqlite index per folder. A file gets its own name once it is complete, and its row
after that. A record is served only if its checksum matches its row. The MLX thread turns arrays into bytes, one I/O
thread writes, and a few threads read. A failure of the folder costs cached work and a log line, never a request. The
index holds the prompts' tokens in plain form, so only the owner may read it.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from .index import DiskRow, RecordIndex, file_name
from .private import create_private
from .record_file import Data, Part, as_bytes, checksum, decode, encode, read_into

__all__ = ["DiskTier"]

log = logging.getLogger(__name__)

R = TypeVar("R")
_READERS = 4  # threads; also the number of files read ahead


@dataclass(slots=True)
class _Known:
    """A record that is on disk or queued. `parts` are its bytes while it is queued."""

    checksum: bytes = b""
    parts: list[Part] | None = None
    pending_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Write:
    row: DiskRow
    known: _Known
    used: float


@dataclass(frozen=True, slots=True)
class _Touch:
    keys: tuple[str, ...]
    used: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class _Remove:
    keys: tuple[str, ...]


class DiskTier:
    """A folder of records within a byte budget. Methods run on the MLX thread unless listed under another thread.

    Args:
        folder: made if missing. Several processes may share one; each sees the records from before its start.
        byte_limit: of all files together; the least recently used records make room.
        pending_limit: bytes waiting to be written; further records are refused.

    Attributes:
        enabled: False if the folder can't be used: nothing is found and nothing is kept.
        trouble: why it can't be used; also logged.
        evictions: records dropped to make room, by this process.
        nbytes: of all files, as last seen by this process.
    """

    def __init__(self, folder: str | Path, byte_limit: int, pending_limit: int = 1 << 29) -> None:
        self.folder = Path(folder)
        self.byte_limit = byte_limit
        self.evictions = 0
        self.nbytes = 0
        self._pending_limit = pending_limit
        self._pending_bytes = 0
        self._lock = threading.Lock()  # over _known, _pending_bytes, and evictions
        self._known: dict[str, _Known] = {}
        self._jobs: queue.Queue[_Write | _Touch | _Remove | None] = queue.Queue()
        self._temporary = itertools.count()
        self._stamp = 0.0
        self.trouble = ""
        self.enabled = self._open()
        self._thread = threading.Thread(target=self._loop, name="mlx-specprefill-cache-io", daemon=True)
        if self.enabled:
            self._thread.start()

    # -- MLX thread

    def has(self, key: str) -> bool:
        """Return whether a record is on disk or queued."""
        with self._lock:
            return key in self._known

    def begin(self) -> None:
        """Start a new look-up or store. All records touched until the next one count as used at the same time.

        So a block never looks older than its children, and never makes room for them.
        """
        self._stamp = max(time.time(), self._stamp + 1e-6)

    def namespaces(self) -> list[str]:
        """Return the namespaces that earlier processes wrote; none if the index can't be read."""
        return self._read_index(lambda: self._index.namespaces())

    def rows(self, namespace: str) -> list[DiskRow]:
        """Return the rows that earlier processes wrote in this namespace; none if the index can't be read."""
        return self._read_index(lambda: self._index.rows(namespace))

    def _read_index(self, rows: Callable[[], list[R]]) -> list[R]:
        if not self.enabled:
            return []
        self.flush()
        try:
            return rows()
        except sqlite3.Error as error:
            log.warning("the index of %s can't be read: %s", self.folder, error)
            return []

    def write(self, row: DiskRow, arrays: Mapping[str, mx.array]) -> bool:
        """Copy the arrays and queue them for writing; return False if refused. A known key is not written again."""
        if not self.enabled:
            return False
        parts = encode(arrays, {"key": row.key, "namespace": row.namespace})
        nbytes = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
        with self._lock:
            if row.key in self._known:
                return True
            if nbytes > self.byte_limit or self._pending_bytes + nbytes > self._pending_limit:
                return False
            known = self._known[row.key] = _Known(parts=parts, pending_bytes=nbytes)
            self._pending_bytes += nbytes
        self._jobs.put(_Write(row, known, self._stamp))
        return True

    def read(self, keys: Sequence[str], namespace: str) -> Iterator[dict[str, mx.array] | None]:
        """Yield records' arrays in this order, bit for bit; None for a missing or corrupt record.

        A few threads read and check the next records meanwhile, at most one each.
        """
        buffers = queue.SimpleQueue[bytearray]()  # reused: new memory costs more than reading
        waiting: deque[tuple[str, Future[Data | None]]] = deque()
        with ThreadPoolExecutor(_READERS, "mlx-specprefill-cache-read") as readers:
            for key in keys:
                waiting.append((key, readers.submit(self._bytes, key, buffers)))
                if len(waiting) > _READERS:
                    yield self._decoded(*waiting.popleft(), namespace, buffers)
            while waiting:
                yield self._decoded(*waiting.popleft(), namespace, buffers)

    def _bytes(self, key: str, buffers: queue.SimpleQueue[bytearray]) -> Data | None:
        """Return a record's file in one of the buffers, or its queued bytes. Runs on a thread of `read`.

        Raises:
            OSError: it can't be read.
            ValueError: its checksum is wrong.
        """
        with self._lock:
            known = self._known.get(key)
            parts = known.parts if known is not None else None
        if known is None:
            return None
        if parts is not None:
            return b"".join(map(as_bytes, parts))
        try:
            buffer = buffers.get_nowait()
        except queue.Empty:
            buffer = bytearray()
        data = read_into(self._path(key), buffer)
        if checksum([data], len(known.checksum)) != known.checksum:
            raise ValueError("its checksum is wrong")
        return data

    def _decoded(
        self, key: str, read: Future[Data | None], namespace: str, buffers: queue.SimpleQueue[bytearray]
    ) -> dict[str, mx.array] | None:
        try:
            data = read.result()
            arrays = None if data is None else decode(data, {"key": key, "namespace": namespace})
        except (OSError, ValueError, KeyError) as error:
            log.warning("cached record %s is skipped: %s", self._path(key).name, error)
            self.remove([key])
            return None
        if isinstance(data, memoryview) and isinstance(data.obj, bytearray):
            buffers.put(data.obj)
        return arrays

    def touch(self, keys: Sequence[str], pinned: bool = False) -> None:
        """Mark these records and those that they need as used now; `pinned`: pin them."""
        if self.enabled and keys:
            self._jobs.put(_Touch(tuple(keys), self._stamp, pinned))

    def remove(self, keys: Sequence[str]) -> None:
        """Delete records; unknown keys have no effect."""
        with self._lock:
            found = tuple(key for key in keys if self._known.pop(key, None) is not None)
        if found:
            self._jobs.put(_Remove(found))

    def flush(self) -> None:
        """Wait until all queued work is on disk."""
        if self.enabled and self._thread.is_alive():
            self._jobs.join()

    def close(self) -> None:
        """Write the queued records and stop. Nothing is found or kept afterwards."""
        if not self.enabled:
            return
        self._jobs.put(None)
        self._thread.join()
        self.enabled = False
        self._known.clear()
        self._index.close()

    def _path(self, key: str) -> Path:
        return self.folder / file_name(key)

    def _open(self) -> bool:
        try:
            self._index = RecordIndex(self.folder)
            self.nbytes = self._index.total()
        except (sqlite3.Error, OSError) as error:
            self.trouble = str(error)
            log.warning("no disk cache: %s", error)
            return False
        self._known = {key: _Known(checksum) for key, checksum in self._index.known.items()}
        self._stamp = self._index.newest
        return True

    # -- I/O thread

    def _loop(self) -> None:
        failing = False
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
                failing = failing and not isinstance(job, _Write)
            except (sqlite3.Error, OSError) as error:
                level = logging.DEBUG if failing else logging.WARNING  # one warning per row of failures
                log.log(level, "the disk cache could not %s: %s", type(job).__name__.strip("_").lower(), error)
                failing = True
                if isinstance(job, _Write):
                    self._written(job, None)
            except Exception:
                log.exception("the disk cache failed")
                if isinstance(job, _Write):
                    self._written(job, None)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, job: _Write | _Touch | _Remove) -> None:
        if isinstance(job, _Write):
            self._write(job)
        elif isinstance(job, _Touch):
            self._index.touch(job.keys, job.used, job.pinned)
        else:
            self._delete(job.keys)

    def _write(self, job: _Write) -> None:
        with self._lock:
            wanted = self._known.get(job.row.key) is job.known
        parts = job.known.parts
        if not wanted or parts is None or not self._make_room(job):
            self._written(job, None)
            return
        row, digest = job.row, checksum(parts)
        temporary = self.folder / f"{row.key}.{os.getpid()}-{next(self._temporary)}.tmp"
        try:
            with create_private(temporary) as file:
                for part in parts:
                    file.write(as_bytes(part))
                file.flush()
                os.fsync(file.fileno())
            size, publish = job.known.pending_bytes, partial(temporary.replace, self._path(row.key))
            self._index.add(row, size, digest, job.used, publish)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.nbytes = self._index.total()
        self._written(job, digest)

    def _written(self, job: _Write, digest: bytes | None) -> None:
        """Note that the record is in its file, or failed."""
        with self._lock:
            self._pending_bytes -= job.known.pending_bytes
            if digest is not None:
                job.known.checksum = digest
            elif self._known.get(job.row.key) is job.known:
                del self._known[job.row.key]
                self.evictions += 1
            job.known.parts = None

    def _make_room(self, job: _Write) -> bool:
        """Delete records used before this record's call; return False if that isn't enough."""
        while True:
            excess = self._index.total() + job.known.pending_bytes - self.byte_limit
            if excess <= 0:
                return True
            victims = self._index.oldest(job.used, excess, self.byte_limit // 2)
            if not victims:
                return False
            with self._lock:  # first: a later request misses, or writes the record anew
                self.evictions += len(victims)
                for key in victims:
                    self._known.pop(key, None)
            self._delete(victims)

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete the rows, then the files: a file without a row is removed at the next start, a row without a file is a
        miss.
        """
        self._index.remove(keys)
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        self.nbytes = self._index.total()
