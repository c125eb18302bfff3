"""Stored arrays in files, with an index, that survive a restart.

One safetensors file per record, one sqlite index per folder. A file gets its own name once it is complete, and its row
after that. A record is served only if its checksum matches its row. The MLX thread turns arrays into bytes, one I/O
thread writes, and a few threads read. A failure of the folder costs cached work and a log line, never a request. The
index holds the prompts' tokens in plain form, so only the owner may read it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import queue
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...request import CacheLabel
from .index import DiskRow, RecordIndex, create_private, file_name
from .nodes import LABEL_MARK, Arrays, Node, Record, RecordKind, block_digest, labelled, make_root, token_bytes

VERSION = 1
_FORMAT = "mlx-specprefill-prefix"
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
# Types that numpy has and passes on bit for bit. Other types are stored as integers.
_AS_THEY_ARE = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "F16": "<f2", "F32": "<f4"}
Data = bytes | memoryview
Part = Data | npt.NDArray[np.generic]
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def as_bytes(part: Part) -> Data:
    return part.data if isinstance(part, np.ndarray) else part


def read_into(path: Path, buffer: bytearray) -> memoryview:
    """Return a file's bytes, in the buffer if they fit, else in a new one, which is the result's `obj`.

    Raises:
        OSError: it can't be read.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        view = memoryview(buffer if len(buffer) >= size else bytearray(size))
        done = 0
        while done < size and (count := file.readinto(view[done:size])):
            done += count
    return view[:done]


def checksum(parts: Sequence[Part], size: int = 32) -> bytes:
    """Return a digest of `size` bytes: 32, or 24 in files of earlier versions."""
    # Processors have instructions for SHA-256; it takes a fraction of BLAKE2's time.
    digest = hashlib.sha256() if size == hashlib.sha256().digest_size else hashlib.blake2b(digest_size=size)
    for part in parts:
        digest.update(as_bytes(part))
    return digest.digest()


def encode(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> list[Part]:
    """Return a safetensors file in parts: header, then one flat array of unsigned integers per array."""
    header: dict[str, Any] = {"__metadata__": {"format": _FORMAT, "version": str(VERSION), **metadata}}
    parts: list[Part] = []
    offset = 0
    flat = {name: array.reshape(-1).view(_BITS[array.dtype.size]) for name, array in arrays.items() if array.size}
    mx.eval(flat)  # together: each call waits for the device
    for name, array in arrays.items():
        raw = np.array(flat[name]) if array.size else np.zeros(0, np.uint8)
        offsets = [offset, offset + raw.nbytes]
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        offset += raw.nbytes
        parts.append(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *parts]


def decode(data: Data, metadata: Mapping[str, str]) -> dict[str, mx.array]:
    """Return the arrays of a file from `encode`.

    Raises:
        ValueError: it was made for another record, by another version, or not by us.
        KeyError: as ValueError.
    """
    (size,) = struct.unpack_from("<Q", data) if len(data) >= 8 else (0,)
    header = json.loads(bytes(data[8 : 8 + size]))
    said = header.pop("__metadata__")
    if said != {"format": _FORMAT, "version": str(VERSION), **metadata}:
        raise ValueError(f"it belongs elsewhere: {said}")
    return {name: _array(data, 8 + size, spec) for name, spec in header.items()}


def _array(data: Data, base: int, spec: Mapping[str, Any]) -> mx.array:
    dtype = _DTYPES[spec["dtype"]]
    start, end = spec["data_offsets"]
    own = _AS_THEY_ARE.get(spec["dtype"])
    bits = np.dtype(own or f"<u{dtype.size}")
    raw = np.frombuffer(data, dtype=bits, count=(end - start) // dtype.size, offset=base + start)
    array = mx.array(raw.reshape(spec["shape"]))
    return array if own else array.view(dtype)


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
                    yield self._decode(*waiting.popleft(), namespace, buffers)
            while waiting:
                yield self._decode(*waiting.popleft(), namespace, buffers)

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

    def _decode(
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
                    self._note_written(job, None)
            except Exception:
                log.exception("the disk cache failed")
                if isinstance(job, _Write):
                    self._note_written(job, None)
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
            self._note_written(job, None)
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
        self._note_written(job, digest)

    def _note_written(self, job: _Write, digest: bytes | None) -> None:
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


MakeRecord = Callable[[Node, RecordKind, int], Record]


class StoredTree:
    """The records of one model's tree on disk.

    Args:
        identity: of the model; another identity, or another block size, never sees these records.
        only_pinned: only pinned records are written, and none of requests with a salt.
    """

    def __init__(self, disk: DiskTier, identity: str, block_size: int, only_pinned: bool = False) -> None:
        self.disk = disk
        self._only_pinned = only_pinned
        self._identity = identity
        self._block_size = block_size
        self._namespace = f"{identity}:{block_size}"
        self._evictions = 0  # of the disk tier, at the last call of `has_evicted`

    def begin(self) -> None:
        """Start a new look-up or store, as `DiskTier.begin`."""
        self.disk.begin()

    def has(self, record: Record) -> bool:
        return self.disk.has(record.key)

    def read(self, records: Sequence[Record]) -> Iterator[Arrays | None]:
        """Yield the arrays of one label's records in this order; None for a record that can't be read."""
        if not records:
            return iter(())
        return self.disk.read([record.key for record in records], self._namespace_of(records[0].node.label))

    def write(self, record: Record) -> None:
        """Queue a record after those that it needs; no effect if it is stored or can't be written."""
        if self.has(record) or not self._may_write(record):
            return
        waiting = [record]
        node = record.node if record.kind == "state" else record.node.parent
        while node is not None and node.record is not None and not self.has(node.record):
            waiting.append(node.record)
            node = node.parent
        for item in reversed(waiting):
            if item.arrays is None or not self.disk.write(self._row(item), item.arrays):
                return

    def save(self, record: Record) -> None:
        """Queue a record that memory evicts and that was refused when it was stored."""
        if not self.has(record):
            self.touch(record.node.blocks())
            self.write(record)

    def _may_write(self, record: Record) -> bool:
        return not self._only_pinned or (record.rank == 2 and not record.node.label.salt)

    def touch(self, records: Sequence[Record]) -> None:
        for pinned in (False, True):
            self.disk.touch([record.key for record in records if (record.rank == 2) == pinned], pinned)

    def remove(self, record: Record) -> None:
        self.disk.remove([record.key])

    def has_evicted(self) -> bool:
        """Return whether the disk tier has evicted anything since the last call."""
        if self.disk.evictions == self._evictions:
            return False
        self._evictions = self.disk.evictions
        return True

    def restore(self, make_record: MakeRecord) -> dict[CacheLabel, Node]:
        """Return the trees of an earlier process, by label. Records without the blocks before them are deleted."""
        labels = {name: label for name in self.disk.namespaces() if (label := self._label_of(name)) is not None}
        roots = [make_root(self._identity, self._block_size, label) for label in labels.values()]
        nodes = {root.digest.hex(): root for root in roots}
        rows = [row for name in labels for row in self.disk.rows(name)]
        rows.sort(key=lambda row: (row.end, row.key))  # a state's key sorts after its node's
        useless = [row.key for row in rows if not _attach(row, nodes, make_record)]
        if useless:
            log.info("%d stored records without the blocks before them are deleted", len(useless))
            self.disk.remove(useless)
        return {root.label: root for root in roots if root.children}

    def _row(self, record: Record) -> DiskRow:
        node = record.node
        assert node.parent is not None
        return DiskRow(
            key=record.key,
            namespace=self._namespace_of(node.label),
            parent=node.parent.digest.hex(),
            tokens=token_bytes(node.tokens) if record.kind == "tokens" else b"",
            end=node.end,
            array_bytes=record.nbytes,
            pinned=record.rank == 2,
            choice=node.choice if record.kind == "tokens" else None,
            positions=b"" if node.positions is None or record.kind == "state" else token_bytes(node.positions),
        )

    def _namespace_of(self, label: CacheLabel) -> str:
        return labelled(self._namespace, label)

    def _label_of(self, namespace: str) -> CacheLabel | None:
        """Return the namespace's label; None for another model or block size."""
        own, _, label = namespace.partition(LABEL_MARK)
        owner, _, salt = label.partition("/")
        return CacheLabel(owner, salt) if own == self._namespace else None


def _attach(row: DiskRow, nodes: dict[str, Node], make_record: MakeRecord) -> bool:
    """Add a stored record to the tree; return False if its parent is missing."""
    digest = row.key.removesuffix("-state")
    if row.key != digest:
        if digest not in nodes:
            return False
        nodes[digest].state = _mark_stored(make_record(nodes[digest], "state", row.array_bytes), row)
        return True
    parent, tokens = nodes.get(row.parent), np.frombuffer(row.tokens, dtype="<i4")
    positions = None if row.choice is None else np.frombuffer(row.positions, dtype="<i4")
    if parent is None or block_digest(parent.digest, tokens, row.choice, positions).hex() != digest:
        return False
    node = nodes[digest] = Node(parent, tokens, bytes.fromhex(digest), parent.label, row.choice, positions)
    node.record = _mark_stored(make_record(node, "tokens", row.array_bytes), row)
    parent.children[node.digest] = node
    return True


def _mark_stored(record: Record, row: DiskRow) -> Record:
    """Set the fields of a stored record."""
    record.pinned = bool(row.pinned)
    record.hits = int(row.pinned)
    return record
