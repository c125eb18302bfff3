"""Stored arrays in files, with an index: what survives a restart.

One safetensors file per record, one sqlite index per folder. A file comes into being under its own name only when it
is complete, its row only after that, and nothing is served whose bytes don't hash to what the row says. Arrays are
turned into bytes on the MLX thread; one I/O thread does all writing. Whatever goes wrong with the folder costs cached
work and a log line, never a request. The index holds the prompts' tokens as they are, so only the owner may read.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import queue
import re
import sqlite3
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .private import create_private, make_private

__all__ = ["DiskRow", "DiskTier"]

log = logging.getLogger(__name__)

_VERSION = 1  # of the index and of the records
_FORMAT = "mlx-specprefill-prefix"
_RECORD = re.compile(r"[0-9a-f]+(-state)?\.safetensors")
_TEMPORARY = re.compile(r"[0-9a-f]+(-state)?\.\d+-\d+\.tmp")
_INDEX_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_LOCK = "lock"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY,
    namespace TEXT NOT NULL,
    parent TEXT NOT NULL,
    tokens BLOB NOT NULL,
    end INTEGER NOT NULL,
    array_bytes INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON records (used, end DESC);
CREATE INDEX IF NOT EXISTS by_namespace ON records (namespace);
"""
_BITS: dict[int, Any] = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_DTYPES = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_Part = bytes | npt.NDArray[np.generic]
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class DiskRow:
    """What the index knows of a record besides its file.

    Attributes:
        key: hexadecimal, unique over all namespaces; "-state" at its end marks a state.
        parent: the key of the block before it.
        tokens: its own token ids, little-endian int32; empty for a state.
        end: tokens from the start of the prompt to its end.
        array_bytes: of its arrays in memory.
    """

    key: str
    namespace: str
    parent: str
    tokens: bytes
    end: int
    array_bytes: int


@dataclass(slots=True)
class _Known:
    """A record that is on disk, or will be. `parts` are its bytes until it is."""

    checksum: bytes = b""
    parts: list[_Part] | None = None
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


@dataclass(frozen=True, slots=True)
class _Remove:
    keys: tuple[str, ...]


class DiskTier:
    """A folder of records within a byte budget. Every method but the I/O thread's own runs on the MLX thread.

    Args:
        folder: made if missing. Several processes may share one; none sees what another adds before its own start.
        byte_limit: of all files together; the records that were used longest ago make room.
        pending_limit: bytes waiting to be written; beyond it records are not taken.

    Attributes:
        enabled: False when the folder can't be used: nothing is found and nothing is kept.
        trouble: why it can't be used; the log says so too.
        evictions: records dropped to make room, by this process.
        nbytes: of all files, as this process last saw them.
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

    # -- the MLX thread's side

    def has(self, key: str) -> bool:
        """Whether a record is on disk or on its way there."""
        with self._lock:
            return key in self._known

    def begin(self) -> None:
        """A new look-up or store: what is touched and written until the next one counts as used at the same time.

        So a block never looks older than what continues it, and never makes room for it.
        """
        self._stamp = max(time.time(), self._stamp + 1e-6)

    def namespaces(self) -> list[str]:
        """Those that earlier processes left something in."""
        return [name for (name,) in self._select("SELECT DISTINCT namespace FROM records")]

    def rows(self, namespace: str) -> list[DiskRow]:
        """What earlier processes left in this namespace."""
        query = "SELECT key, namespace, parent, tokens, end, array_bytes FROM records WHERE namespace = ?"
        return [DiskRow(*row) for row in self._select(query, namespace)]

    def _select(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Rows of the index; none when it can't be read."""
        if not self.enabled:
            return []
        self.flush()
        try:
            with self._database:
                return self._database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            log.warning("the index of %s can't be read: %s", self.folder, error)
            return []

    def write(self, row: DiskRow, arrays: Mapping[str, mx.array]) -> bool:
        """Take a copy of the arrays and write it later; False when it won't be. A known key is not written again."""
        if not self.enabled:
            return False
        parts = _encode(arrays, {"key": row.key, "namespace": row.namespace})
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

    def read(self, key: str, namespace: str) -> dict[str, mx.array] | None:
        """A record's arrays, bit for bit; None when there is none or it is not what was written."""
        with self._lock:
            known = self._known.get(key)
            parts = known.parts if known is not None else None
        if known is None:
            return None
        try:
            data = b"".join(map(_bytes, parts)) if parts is not None else self._path(key).read_bytes()
            if parts is None and _checksum([data]) != known.checksum:
                raise ValueError("its checksum is wrong")
            return _decode(data, {"key": key, "namespace": namespace})
        except (OSError, ValueError, KeyError) as error:
            log.warning("cached record %s is skipped: %s", self._path(key).name, error)
            self.remove([key])
            return None

    def touch(self, keys: Sequence[str]) -> None:
        """These records are in use, and so must be the ones that they need."""
        if self.enabled and keys:
            self._jobs.put(_Touch(tuple(keys), self._stamp))

    def remove(self, keys: Sequence[str]) -> None:
        """Forget records; unknown keys have no effect."""
        with self._lock:
            found = tuple(key for key in keys if self._known.pop(key, None) is not None)
        if found:
            self._jobs.put(_Remove(found))

    def flush(self) -> None:
        """Wait until everything so far is on disk."""
        if self.enabled and self._thread.is_alive():
            self._jobs.join()

    def close(self) -> None:
        """Write what waits and stop. Nothing is found or kept afterwards."""
        if not self.enabled:
            return
        self._jobs.put(None)
        self._thread.join()
        self.enabled = False
        self._known.clear()
        self._database.close()
        os.close(self._lock_file)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    # -- opening

    def _open(self) -> bool:
        try:
            mended = make_private(self.folder, _is_ours)
            self._lock_file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            return self._unusable(str(error))
        if mended:
            log.warning("%s holds prompts: what was open to others is closed now (%d files)", self.folder, mended)
        alone = self._try_lock()
        try:
            self._database = self._open_index(alone)
            self._load(alone)
            self.nbytes = self._total()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_file)
            return self._unusable(f"the index of {self.folder} can't be used: {error}")
        if alone:
            fcntl.flock(self._lock_file, fcntl.LOCK_SH)
        return True

    def _unusable(self, trouble: str) -> bool:
        self.trouble = trouble
        log.warning("no disk cache: %s", trouble)
        return False

    def _try_lock(self) -> bool:
        """True when no other process uses the folder. The lock goes with the process, however it ends."""
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_SH)
            except OSError as error:  # some network file systems have no locks
                log.warning("%s can't be locked: %s", self.folder, error)
            return False

    def _open_index(self, alone: bool) -> sqlite3.Connection:
        """The index; a broken one or one of another version is started afresh if nobody else is using it."""
        try:
            return self._connect()
        except sqlite3.DatabaseError as error:
            if not alone:
                raise
            log.warning("the index of %s starts empty: %s", self.folder, error)
        for name in _INDEX_FILES:
            (self.folder / name).unlink(missing_ok=True)
        return self._connect()

    def _connect(self) -> sqlite3.Connection:
        index = self.folder / _INDEX_FILES[0]
        os.close(os.open(index, os.O_RDWR | os.O_CREAT, 0o600))  # sqlite gives its other files the rights of this one
        database = sqlite3.connect(index, timeout=5.0, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if tables and version != _VERSION:
                raise sqlite3.DatabaseError(f"it has version {version}, not {_VERSION}")
            if database.execute("PRAGMA quick_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("it is damaged")
            database.executescript(f"{_SCHEMA} PRAGMA user_version = {_VERSION};")
        except BaseException:
            database.close()
            raise
        return database

    def _load(self, alone: bool) -> None:
        """Fill the index in memory; without other users, make folder and index agree first."""
        rows = self._database.execute("SELECT key, checksum, used FROM records").fetchall()
        files = {path.name for path in self.folder.iterdir()}
        known = {key: _Known(checksum) for key, checksum, _ in rows if self._path(key).name in files}
        self._known.update(known)
        self._stamp = max((used for _, _, used in rows), default=0.0)
        if not alone:
            return
        lost = [(key,) for key, _, _ in rows if key not in known]
        with self._database:
            self._database.executemany("DELETE FROM records WHERE key = ?", lost)
        orphans = [name for name in files if _RECORD.fullmatch(name) and name.removesuffix(".safetensors") not in known]
        for name in [*orphans, *(name for name in files if _TEMPORARY.fullmatch(name))]:
            (self.folder / name).unlink(missing_ok=True)
        if lost or orphans:
            log.info("%s: %d rows without file, %d files without row dropped", self.folder, len(lost), len(orphans))

    # -- the I/O thread's side

    def _loop(self) -> None:
        failing = False
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
                failing = failing and not isinstance(job, _Write)
            except (sqlite3.Error, OSError) as error:
                level = logging.DEBUG if failing else logging.WARNING  # once per row of failures
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
            with self._database:
                rows = [(job.used, key) for key in job.keys]
                self._database.executemany("UPDATE records SET used = ? WHERE key = ?", rows)
        else:
            self._delete(job.keys)

    def _write(self, job: _Write) -> None:
        with self._lock:
            wanted = self._known.get(job.row.key) is job.known
        parts = job.known.parts
        if not wanted or parts is None or not self._make_room(job):
            self._written(job, None)
            return
        row, checksum = job.row, _checksum(parts)
        temporary = self.folder / f"{row.key}.{os.getpid()}-{next(self._temporary)}.tmp"
        try:
            with create_private(temporary) as file:
                for part in parts:
                    file.write(_bytes(part))
                file.flush()
                os.fsync(file.fileno())
            with self._database:
                # The index's lock makes file and row one step for other processes.
                self._database.execute("BEGIN IMMEDIATE")
                temporary.replace(self._path(row.key))
                values = row.key, row.namespace, row.parent, row.tokens, row.end, row.array_bytes
                self._database.execute(
                    "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (*values, job.known.pending_bytes, checksum, job.used),
                )
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self.nbytes = self._total()
        self._written(job, checksum)

    def _written(self, job: _Write, checksum: bytes | None) -> None:
        """The record is in its file now, or never will be."""
        with self._lock:
            self._pending_bytes -= job.known.pending_bytes
            if checksum is not None:
                job.known.checksum = checksum
            elif self._known.get(job.row.key) is job.known:
                del self._known[job.row.key]
                self.evictions += 1
            job.known.parts = None

    def _make_room(self, job: _Write) -> bool:
        """Delete what was used before this record's call; False when that isn't enough."""
        while True:
            excess = self._total() + job.known.pending_bytes - self.byte_limit
            if excess <= 0:
                return True
            query = "SELECT key, file_bytes FROM records WHERE used < ? ORDER BY used, end DESC, key DESC LIMIT 64"
            oldest = self._database.execute(query, (job.used,)).fetchall()
            victims = []
            for key, nbytes in oldest:
                if excess <= 0:
                    break
                victims.append(key)
                excess -= nbytes
            if not victims:
                return False
            with self._lock:  # first: a record that is asked for now is a miss, or is written anew after this one
                self.evictions += len(victims)
                for key in victims:
                    self._known.pop(key, None)
            self._delete(victims)

    def _delete(self, keys: Sequence[str]) -> None:
        """Rows first: a file without a row is swept up at the next start, a row without a file is a miss."""
        with self._database:
            self._database.executemany("DELETE FROM records WHERE key = ?", [(key,) for key in keys])
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        self.nbytes = self._total()

    def _total(self) -> int:
        (total,) = self._database.execute("SELECT COALESCE(SUM(file_bytes), 0) FROM records").fetchone()
        return int(total)


def _is_ours(name: str) -> bool:
    return name in (*_INDEX_FILES, _LOCK) or bool(_RECORD.fullmatch(name) or _TEMPORARY.fullmatch(name))


def _bytes(part: _Part) -> bytes | memoryview:
    return part if isinstance(part, bytes) else part.data


def _checksum(parts: Sequence[_Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=24)
    for part in parts:
        digest.update(_bytes(part))
    return digest.digest()


def _encode(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> list[_Part]:
    """A safetensors file in parts: header, then one flat array of unsigned integers per array."""
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": str(_VERSION), **metadata}}
    parts: list[_Part] = []
    offset = 0
    for name, array in arrays.items():
        raw = np.array(array.reshape(-1).view(_BITS[array.dtype.size])) if array.size else np.zeros(0, np.uint8)
        offsets = [offset, offset + raw.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        offset += raw.nbytes
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]


def _decode(data: bytes, metadata: Mapping[str, str]) -> dict[str, mx.array]:
    """The arrays of a file that `_encode` made.

    Raises:
        ValueError: it was made for another record, by another version, or not by us.
        KeyError: as ValueError.
    """
    (size,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    header = json.loads(data[8 : 8 + size])
    said = header.pop("__metadata__")
    if said != {"format": _FORMAT, "version": str(_VERSION), **metadata}:
        raise ValueError(f"it belongs elsewhere: {said}")
    return {name: _array(data, 8 + size, spec) for name, spec in header.items()}


def _array(data: bytes, base: int, spec: Mapping[str, Any]) -> mx.array:
    dtype = _DTYPES[spec["dtype"]]
    start, end = spec["data_offsets"]
    count = (end - start) // dtype.size
    bits = np.dtype(f"<u{dtype.size}")
    raw = mx.array(np.frombuffer(data, dtype=bits, count=count, offset=base + start))
    return raw.view(dtype).reshape(spec["shape"])
