"""A prefix cache whose records outlive memory and the process, in the files of a disk tier."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...request import CacheLabel
from .disk import DiskTier
from .index import DiskRow
from .nodes import LABEL_MARK, Arrays, Node, Record, RecordKind, block_digest, labelled, token_bytes
from .tree import PrefixCache

log = logging.getLogger(__name__)


class StoredPrefixCache(PrefixCache):
    """Prefixes of one model, in memory and on disk.

    Args:
        disk: has its own limits.
        only_pinned: only pinned prefixes (see `store`) go to disk, and none of requests with a salt.
        parts, settings: as of `PrefixCache`.
    """

    def __init__(self, disk: DiskTier, only_pinned: bool, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.disk = disk
        self._only_pinned = only_pinned
        self._namespace = f"{self._identity}:{self.block_size}"
        self._evictions = 0  # of the disk tier, at the latest sweep
        if self.refusal is None:
            self._restore()

    def _restore(self) -> None:
        """Build the trees of an earlier process. Records without the blocks before them are deleted."""
        rows = sorted(self.disk.rows(self._namespace), key=lambda row: (row.end, row.key))  # states after their nodes
        labels = {row.namespace.partition(LABEL_MARK)[2].partition("/") for row in rows}
        roots = [self._make_root(CacheLabel(owner, salt)) for owner, _, salt in labels]
        nodes = {root.digest.hex(): root for root in roots}
        useless = [row.key for row in rows if not self._attach(row, nodes)]
        if useless:
            log.info("%d stored records without the blocks before them are deleted", len(useless))
            self.disk.remove(useless)
        self._roots = {root.label: root for root in roots if root.children}

    def _attach(self, row: DiskRow, nodes: dict[str, Node]) -> bool:
        """Add a stored record to the tree; return False if its parent is missing."""
        node = nodes.get(row.key.removesuffix("-state"))
        kind: RecordKind = "state" if row.key.endswith("-state") else "tokens"
        if kind == "tokens":
            parent, tokens = nodes.get(row.parent), np.frombuffer(row.tokens, dtype="<i4")
            positions = None if row.selection_key is None else np.frombuffer(row.positions, dtype="<i4")
            if (
                parent is not None
                and block_digest(parent.digest, tokens, row.selection_key, positions).hex() == row.key
            ):
                node = Node(parent, tokens, bytes.fromhex(row.key), parent.label, row.selection_key, positions)
                nodes[row.key] = parent.children[node.digest] = node
        if node is None:
            return False
        record = self._record(node, kind, row.array_bytes)
        record.pinned, record.hits = bool(row.pinned), int(row.pinned)
        if kind == "state":
            node.state = record
        else:
            node.record = record
        return True

    def _begin(self) -> None:
        self.disk.begin()
        if self.disk.evictions != self._evictions:
            self._evictions = self.disk.evictions
            self._sweep()

    def _sweep(self) -> None:
        """Remove nodes that the disk tier evicted and memory does not have."""
        for node in list(self._nodes()):
            if not node.removed and not self._there(node.record):
                self._remove(node)
            elif node.state is not None and not self._there(node.state):
                node.state = None

    def _is_stored(self, record: Record) -> bool:
        return self.disk.has(record.key)

    def _load(self, records: Sequence[Record]) -> Iterator[Arrays | None]:
        missing = [record.key for record in records if record.arrays is None]
        read = self.disk.read(missing, labelled(self._namespace, records[0].node.label)) if missing else iter(())
        for record in records:
            yield next(read, None) if record.arrays is None else record.arrays

    def _touch(self, records: Sequence[Record], hit: bool = False) -> None:
        super()._touch(records, hit)
        self._touch_on_disk(records)

    def _touch_on_disk(self, records: Sequence[Record]) -> None:
        for pinned in (False, True):
            self.disk.touch([record.key for record in records if (record.rank == 2) == pinned], pinned)

    def _save(self, records: Sequence[Record]) -> None:
        """Queue each record after those that it needs, unless it is stored, not wanted on disk, or refused."""
        for record in records:
            if self._is_stored(record) or not self._takes(record):
                continue
            waiting, node = [record], record.node if record.kind == "state" else record.node.parent
            while node is not None and node.record is not None and not self._is_stored(node.record):
                waiting.append(node.record)
                node = node.parent
            for item in reversed(waiting):
                if item.arrays is None or not self.disk.write(self._row(item), item.arrays):
                    break

    def _takes(self, record: Record) -> bool:
        return not self._only_pinned or (record.rank == 2 and not record.node.label.salt)

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
            selection_key=node.selection_key if record.kind == "tokens" else None,
            positions=b"" if node.positions is None or record.kind == "state" else token_bytes(node.positions),
        )

    def _evict(self, record: Record) -> None:
        if not self._is_stored(record) and self._takes(record):  # refused when it was stored
            self._touch_on_disk(record.node.blocks())
            self._save([record])
        super()._evict(record)

    def _release(self, record: Record) -> None:
        super()._release(record)
        self.disk.remove([record.key])
