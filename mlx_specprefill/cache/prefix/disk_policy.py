"""Chooses which prefixes go to disk, and brings them back after an eviction or a restart."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .disk import DiskTier
from .identity import block_digest, label_of, labelled, token_bytes
from .layout import Arrays
from .nodes import Node, Record, RecordKind
from .record_file import DiskRow
from .selection_key import SelectionKey
from .tree import PrefixCache, Restoring

log = logging.getLogger(__name__)
_PIECE = 16 << 20  # bytes that are handed to the disk between two calls of `save_some`, or one record
_RUSH = 64 << 20  # bytes of evicted records that are handed over besides; the others are lost


class StoredPrefixCache(PrefixCache):
    """Prefixes of one model, in memory and on disk.

    Args:
        disk: has its own limits.
        only_pinned: only pinned prefixes (see `store`) go to disk, and none of requests with a salt.
        later: most of what is stored goes to disk with the next calls of `save_some`.
        parts, settings: as of `PrefixCache`.
    """

    def __init__(self, disk: DiskTier, only_pinned: bool, *parts: Any, later: bool = False, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.disk = disk
        self._later = later
        self._unsaved: dict[Record, int] = {}  # with the stamp of its last use; a record behind those that it needs
        self._due: float = _PIECE if later else math.inf  # bytes that may be handed over now
        self._rush: float = _RUSH if later else math.inf  # the same of evicted records
        self._only_pinned = only_pinned
        self._namespace = f"{self._identity}:{self.block_size}"
        self._evictions = 0  # of the disk tier, at the latest sweep
        if self.refusal is None:
            self._restore()

    def _restore(self) -> None:
        """Build the trees of an earlier process. Records without the blocks before them are deleted."""
        rows = sorted(self.disk.rows(self._namespace), key=lambda row: (row.end, row.key))  # states after their nodes
        roots = [self._make_root(label) for label in {label_of(row.namespace) for row in rows}]
        nodes = {root.digest.hex(): root for root in roots}
        useless = [row.key for row in rows if not self._attach(row, nodes)]
        if useless:
            log.info("%d stored records without the blocks before them are deleted", len(useless))
            self.disk.remove(useless)
        self._roots = {root.label: root for root in roots if root.children}

    def _attach(self, row: DiskRow, nodes: dict[str, Node]) -> bool:
        """Add a stored record to the tree; return False if its parent is missing, or its values can't be read."""
        node = nodes.get(row.key.removesuffix("-state"))
        kind: RecordKind = "state" if row.key.endswith("-state") else "tokens"
        if kind == "tokens":
            parent = nodes.get(row.parent)
            try:
                tokens = np.frombuffer(bytes.fromhex(row.tokens), dtype="<i4")
                key = None if row.selection_key is None else SelectionKey.parse(row.selection_key)
                positions = None if key is None else np.frombuffer(bytes.fromhex(row.positions), dtype="<i4")
            except ValueError:
                return False
            if parent is not None and block_digest(parent.digest, tokens, key, positions).hex() == row.key:
                node = Node(parent, tokens, bytes.fromhex(row.key), parent.label, key, positions)
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

    def _load(self, records: Sequence[Record]) -> Restoring[list[Arrays | None]]:
        held = [record.arrays for record in records]  # memory may drop them meanwhile
        missing = [record.key for record, arrays in zip(records, held, strict=True) if arrays is None]
        if not missing:
            return held
        read = iter((yield from self.disk.read(missing, labelled(self._namespace, records[0].node.label))))
        return [next(read) if arrays is None else arrays for arrays in held]

    def _touch(self, records: Sequence[Record], hit: bool = False) -> None:
        super()._touch(records, hit)
        self._touch_on_disk(records)

    def _touch_on_disk(self, records: Sequence[Record]) -> None:
        self.disk.touch({record.key: record.rank == 2 for record in records})
        self._unsaved |= {record: self.disk.stamp for record in records if record in self._unsaved}

    def _save(self, records: Sequence[Record]) -> None:
        """Queue each record after those that it needs, unless it is stored or not wanted on disk."""
        for record in records:
            if not self._is_stored(record) and self._takes(record):
                self._unsaved |= dict.fromkeys(self._chain(record), self.disk.stamp)
        self._hand_over()

    def _chain(self, record: Record) -> list[Record]:
        """Return the records that it needs and that are not stored, and itself at the end."""
        chain, needed = [record], _needed(record)
        while needed is not None and not self._is_stored(needed):
            chain.append(needed)
            needed = _needed(needed)
        return chain[::-1]

    def save_some(self) -> None:
        """Hand over what may be handed over now, and begin to count anew."""
        self._hand_over()
        if self._later:
            self._due, self._rush = _PIECE, _RUSH

    def _hand_over(self) -> None:
        while self._unsaved and self._due > 0:
            record = next(iter(self._unsaved))
            if self._later and not self.disk.has_room(record.nbytes):
                break
            self._write(record)
            self._due -= record.nbytes

    @property
    def has_unsaved(self) -> bool:
        return bool(self._unsaved)

    def _write(self, record: Record) -> None:
        """Hand a record to the disk, which may refuse it, unless one that it needs is not there."""
        used, needed = self._unsaved.pop(record, self.disk.stamp), _needed(record)
        if record.arrays is not None and (needed is None or self._is_stored(needed)):
            self.disk.write(self._row(record), record.arrays, used)

    def _takes(self, record: Record) -> bool:
        return not self._only_pinned or (record.rank == 2 and not record.node.label.salt)

    def _row(self, record: Record) -> DiskRow:
        node = record.node
        assert node.parent is not None
        return DiskRow(
            key=record.key,
            namespace=labelled(self._namespace, node.label),
            parent=node.parent.digest.hex(),
            tokens=token_bytes(node.tokens).hex() if record.kind == "tokens" else "",
            end=node.end,
            array_bytes=record.nbytes,
            pinned=record.rank == 2,
            selection_key=str(node.selection_key) if node.selection_key and record.kind == "tokens" else None,
            positions="" if node.positions is None or record.kind == "state" else token_bytes(node.positions).hex(),
        )

    def _evict(self, record: Record) -> None:
        if not self._is_stored(record) and self._takes(record):  # still queued, or refused
            self._touch_on_disk(record.node.blocks())
            chain = self._chain(record)
            self._rush -= sum(item.nbytes for item in chain)
            for item in chain if self._rush >= 0 else ():
                self._write(item)
        super()._evict(record)

    def _release(self, record: Record) -> None:
        super()._release(record)
        self._unsaved.pop(record, None)
        self.disk.remove([record.key])


def _needed(record: Record) -> Record | None:
    """Return the record without which it is useless."""
    node = record.node if record.kind == "state" else record.node.parent
    return None if node is None else node.record
