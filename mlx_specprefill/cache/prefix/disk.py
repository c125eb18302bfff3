"""Stored arrays in files, with an index, that survive a restart; and the records of one tree among them.

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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...request import CacheLabel
from .index import DiskRow, RecordIndex, create_private, file_name
from .nodes import LABEL_MARK, Arrays, Node, Record, RecordKind, block_digest, labelled, make_root, token_bytes

VERSION = 1
_FORMAT = "mlx-specprefill-prefix"
_READERS = 4  # threads; also the number of files read ahead

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
        folder: made if missing. Several processes may share one; each sees the records from before its start. None:
            nothing is kept.
        byte_limit: of all files together; the least recently used records make room.
        pending_limit: bytes waiting to be written; further records are refused.

    Attributes:
        enabled: False without a folder that can be used: nothing is found and nothing is kept.
        trouble: why it can't be used; also logged.
        evictions: records dropped to make room, by this process.
        nbytes: of all files, as last seen by this process.
    """

    def __init__(self, folder: str | Path | None, byte_limit: int = 0, pending_limit: int = 1 << 29) -> None:
        self.byte_limit = byte_limit
        self.evictions = 0
        self.nbytes = 0
        self._pending_limit = pending_limit
        self._pending_bytes = 0
        self._lock = threading.Lock()  # over _known, _pending_bytes, and evictions
        self._known: dict[str, bytes] = {}  # each record's checksum; empty while it is queued
        self._writer = ThreadPoolExecutor(1, "mlx-specprefill-cache-io")
        self._failing = False
        self._temporary = itertools.count()
        self._stamp = 0.0
        self.trouble = ""
        self.enabled = folder is not None and self._open(Path(folder))

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

    def rows(self, namespace: str) -> list[DiskRow]:
        """Return the rows that earlier processes wrote in a namespace, labelled or not; none if the index is broken."""
        if not self.enabled:
            return []
        self.flush()
        try:
            return self._index.rows(namespace, f"{namespace}{LABEL_MARK}*")
        except sqlite3.Error as error:
            log.warning("the index of %s can't be read: %s", self.folder, error)
            return []

    def write(self, row: DiskRow, arrays: Arrays) -> bool:
        """Copy the arrays and queue them for writing; return False if refused. A known key is not written again."""
        if not self.enabled:
            return False
        data = encode(arrays, {"key": row.key, "namespace": row.namespace})
        with self._lock:
            if row.key in self._known:
                return True
            if len(data) > self.byte_limit or self._pending_bytes + len(data) > self._pending_limit:
                return False
            self._known[row.key] = b""
            self._pending_bytes += len(data)
        self._queue("write", self._write, row, data, self._stamp)
        return True

    def read(self, keys: Sequence[str], namespace: str) -> Iterator[Arrays | None]:
        """Yield records' arrays in this order, bit for bit; None for a missing or corrupt record.

        A few threads check the next records meanwhile, at most one each. That brings their files into memory, where
        `load` finds them. A record that is still queued is waited for, with all that is queued before it.
        """
        with self._lock:
            queued = any(self._known.get(key) == b"" for key in keys)
        if queued:
            self.flush()
        waiting: deque[tuple[str, Future[bool]]] = deque()
        with ThreadPoolExecutor(_READERS, "mlx-specprefill-cache-read") as readers:
            for key in keys:
                waiting.append((key, readers.submit(self._check, key)))
                if len(waiting) > _READERS:
                    yield self._load(*waiting.popleft(), namespace)
            while waiting:
                yield self._load(*waiting.popleft(), namespace)

    def _check(self, key: str) -> bool:
        """Return whether there is such a record. Runs on a thread of `read`.

        Raises:
            OSError: its file can't be read.
            ValueError: its file has another checksum.
        """
        with self._lock:
            known = self._known.get(key)
        if known is not None and file_checksum(self._path(key)) != known:
            raise ValueError("its checksum is wrong")
        return known is not None

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
        if self.enabled and keys:
            self._queue("touch", self._index.touch, keys, self._stamp, pinned)

    def remove(self, keys: Sequence[str]) -> None:
        """Delete records; unknown keys have no effect."""
        with self._lock:
            found = [key for key in keys if self._known.pop(key, None) is not None]
        if found:
            self._queue("remove", self._delete, found)

    def flush(self) -> None:
        """Wait until all queued work is on disk."""
        if self.enabled:
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write the queued records and stop. Nothing is found or kept afterwards."""
        if self.enabled:
            self._writer.shutdown()
            self.enabled = False
            self._known.clear()
            self._index.close()

    def _path(self, key: str) -> Path:
        return self.folder / file_name(key)

    def _open(self, folder: Path) -> bool:
        self.folder = folder
        try:
            self._index = RecordIndex(folder)
            self.nbytes = self._index.total()
        except (sqlite3.Error, OSError) as error:
            self.trouble = str(error)
            log.warning("no disk cache: %s", error)
            return False
        self._known = dict(self._index.known)
        self._stamp = self._index.newest
        return True

    def _queue(self, what: str, work: Callable[..., None], *given: object) -> None:
        self._writer.submit(self._run, what, work, *given)

    # -- I/O thread

    def _run(self, what: str, work: Callable[..., None], *given: object) -> None:
        try:
            work(*given)
        except (sqlite3.Error, OSError) as error:
            level = logging.DEBUG if self._failing else logging.WARNING  # one warning per row of failures
            log.log(level, "the disk cache could not %s: %s", what, error)
            self._failing = True
        except Exception:
            log.exception("the disk cache failed")

    def _write(self, row: DiskRow, data: bytes, used: float) -> None:
        """Write a record that is still wanted, if there is room; then it is in its file, or dropped."""
        checksum = b""
        try:
            if self.has(row.key) and self._make_room(len(data), used):
                checksum = self._write_file(row, data, used)
            self._failing = False
        finally:
            with self._lock:
                self._pending_bytes -= len(data)
                if not checksum and self._known.pop(row.key, None) is not None:
                    self.evictions += 1
                elif row.key in self._known:
                    self._known[row.key] = checksum

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

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete the rows, then the files: a file without a row is removed at the next start, a row without a file is a
        miss.
        """
        self._index.remove(keys)
        for key in keys:
            self._path(key).unlink(missing_ok=True)
        self.nbytes = self._index.total()


def file_checksum(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


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

    def has(self, record: Record) -> bool:
        return self.disk.has(record.key)

    def read(self, records: Sequence[Record]) -> Iterator[Arrays | None]:
        """Yield the arrays of one label's records in this order; None for a record that can't be read."""
        if not records:
            return iter(())
        return self.disk.read([record.key for record in records], labelled(self._namespace, records[0].node.label))

    def write(self, record: Record) -> None:
        """Queue a record after those that it needs; no effect if it is stored or can't be written."""
        if self.has(record) or not self._takes(record):
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
        if not self.has(record) and self._takes(record):
            self.touch(record.node.blocks())
            self.write(record)

    def _takes(self, record: Record) -> bool:
        wanted = not self._only_pinned or (record.rank == 2 and not record.node.label.salt)
        return wanted and self.disk.enabled

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
        rows = sorted(self.disk.rows(self._namespace), key=lambda row: (row.end, row.key))  # states after their nodes
        roots = [self.make_root(_label_of(name)) for name in {row.namespace for row in rows}]
        nodes = {root.digest.hex(): root for root in roots}
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
            namespace=labelled(self._namespace, node.label),
            parent=node.parent.digest.hex(),
            tokens=token_bytes(node.tokens) if record.kind == "tokens" else b"",
            end=node.end,
            array_bytes=record.nbytes,
            pinned=record.rank == 2,
            choice=node.choice if record.kind == "tokens" else None,
            positions=b"" if node.positions is None or record.kind == "state" else token_bytes(node.positions),
        )

    def make_root(self, label: CacheLabel) -> Node:
        """Return an empty tree for a label."""
        return make_root(self._identity, self._block_size, label)


def _label_of(namespace: str) -> CacheLabel:
    owner, _, salt = namespace.partition(LABEL_MARK)[2].partition("/")
    return CacheLabel(owner, salt)


def _attach(row: DiskRow, nodes: dict[str, Node], make_record: MakeRecord) -> bool:
    """Add a stored record to the tree; return False if its parent is missing."""
    node = nodes.get(row.key.removesuffix("-state"))
    kind: RecordKind = "state" if row.key.endswith("-state") else "tokens"
    if kind == "tokens":
        parent, tokens = nodes.get(row.parent), np.frombuffer(row.tokens, dtype="<i4")
        positions = None if row.choice is None else np.frombuffer(row.positions, dtype="<i4")
        if parent is not None and block_digest(parent.digest, tokens, row.choice, positions).hex() == row.key:
            node = Node(parent, tokens, bytes.fromhex(row.key), parent.label, row.choice, positions)
            nodes[row.key] = parent.children[node.digest] = node
    if node is None:
        return False
    record = make_record(node, kind, row.array_bytes)
    record.pinned, record.hits = bool(row.pinned), int(row.pinned)
    if kind == "state":
        node.state = record
    else:
        node.record = record
    return True
