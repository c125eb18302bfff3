"""Stores the tree's records on disk, and restores the tree of an earlier process.

Without a disk tier nothing is stored and nothing is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...request import SHARED, CacheLabel
from .disk import DiskTier
from .index import DiskRow
from .nodes import Node, Record, RecordKind, block_digest, root_digest, token_bytes
from .records import Arrays

__all__ = ["StoredTree"]

log = logging.getLogger(__name__)
_AT = "@"  # between a namespace and a label, neither of which contains it

MakeRecord = Callable[[Node, RecordKind, int], Record]


class StoredTree:
    """The records of one model's tree on disk.

    Args:
        identity: of the model; another identity, or another block size, never sees these records.
        only_pinned: only pinned records are written, and none of requests with a salt.
    """

    def __init__(self, disk: DiskTier | None, identity: str, block_size: int, only_pinned: bool = False) -> None:
        self.disk = disk
        self._only_pinned = only_pinned
        self._identity = identity
        self._block_size = block_size
        self._namespace = f"{identity}:{block_size}"
        self._evictions = 0  # of the disk tier, at the last call of `evicted`

    def root(self, label: CacheLabel) -> Node:
        """Return an empty tree for a label."""
        identity = self._identity if label == SHARED else f"{self._identity}{_AT}{label.owner}/{label.salt}"
        return Node(None, np.zeros(0, dtype=np.int32), root_digest(identity, self._block_size), label)

    def begin(self) -> None:
        """Start a new look-up or store, as `DiskTier.begin`."""
        if self.disk is not None:
            self.disk.begin()

    def has(self, record: Record) -> bool:
        return self.disk is not None and self.disk.has(record.key)

    def read(self, records: Sequence[Record]) -> Iterator[Arrays | None]:
        """Yield the arrays of one label's records in this order; None for a record that can't be read."""
        if self.disk is None or not records:
            return iter([None] * len(records))
        return self.disk.read([record.key for record in records], self._namespace_of(records[0].node.label))

    def write(self, record: Record) -> None:
        """Queue a record after those that it needs; no effect if it is stored or can't be written."""
        if self.disk is None or self.has(record) or not self._may_write(record):
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
        if self.disk is not None and not self.has(record):
            self.touch(record.node.blocks())
            self.write(record)

    def _may_write(self, record: Record) -> bool:
        return not self._only_pinned or (record.rank == 2 and not record.node.label.salt)

    def touch(self, records: Sequence[Record]) -> None:
        if self.disk is None:
            return
        for pinned in (False, True):
            self.disk.touch([record.key for record in records if (record.rank == 2) == pinned], pinned)

    def remove(self, record: Record) -> None:
        if self.disk is not None:
            self.disk.remove([record.key])

    def evicted(self) -> bool:
        """Return whether the disk tier has evicted anything since the last call."""
        if self.disk is None or self.disk.evictions == self._evictions:
            return False
        self._evictions = self.disk.evictions
        return True

    def restore(self, make_record: MakeRecord) -> dict[CacheLabel, Node]:
        """Return the trees of an earlier process, by label. Records without the blocks before them are deleted."""
        if self.disk is None:
            return {}
        labels = {name: label for name in self.disk.namespaces() if (label := self._label_of(name)) is not None}
        roots = [self.root(label) for label in labels.values()]
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
        return self._namespace if label == SHARED else f"{self._namespace}{_AT}{label.owner}/{label.salt}"

    def _label_of(self, namespace: str) -> CacheLabel | None:
        """Return the namespace's label; None for another model or block size."""
        own, _, label = namespace.partition(_AT)
        owner, _, salt = label.partition("/")
        return CacheLabel(owner, salt) if own == self._namespace else None


def _attach(row: DiskRow, nodes: dict[str, Node], make_record: MakeRecord) -> bool:
    """Add a stored record to the tree; return False if its parent is missing."""
    digest = row.key.removesuffix("-state")
    if row.key != digest:
        if digest not in nodes:
            return False
        nodes[digest].state = _stored(make_record(nodes[digest], "state", row.array_bytes), row)
        return True
    parent, tokens = nodes.get(row.parent), np.frombuffer(row.tokens, dtype="<i4")
    positions = None if row.choice is None else np.frombuffer(row.positions, dtype="<i4")
    if parent is None or block_digest(parent.digest, tokens, row.choice, positions).hex() != digest:
        return False
    node = nodes[digest] = Node(parent, tokens, bytes.fromhex(digest), parent.label, row.choice, positions)
    node.record = _stored(make_record(node, "tokens", row.array_bytes), row)
    parent.children[node.digest] = node
    return True


def _stored(record: Record, row: DiskRow) -> Record:
    """Set the fields of a stored record."""
    record.pinned = bool(row.pinned)
    record.hits = int(row.pinned)
    return record
