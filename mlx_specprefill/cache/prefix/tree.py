"""The exact prefix cache: what a dense prefill computed for a prefix, computed once.

A tree of token blocks per model and label. A full block hangs below the block before it, a shorter tail below the
last full block; each holds the keys and values of its own tokens only, so prompts share what they have in common.
Layers that can't be trimmed (recurrent, rotating) add a state at the lengths at which `store` saw one, and a model
that has such layers is served at those lengths only. Everything runs on the MLX thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...request import SHARED, CacheLabel
from ..budget import ByteBudget, Entry
from ..fingerprint import block_digest, root_digest, token_bytes
from .disk import DiskRow, DiskTier
from .records import Arrays, Layout, nbytes_of

__all__ = ["PrefixCache", "PrefixEntry", "PrefixHit", "PrefixStats"]

log = logging.getLogger(__name__)
Tokens = npt.NDArray[np.int32]
_AT = "@"  # between a namespace and a label, neither of which has one


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`cache` holds exactly the first `length` tokens and is the caller's to change."""

    length: int
    cache: list[Any]


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """Counts since the start; `nbytes` are held in memory by this cache, `entries` is how many `entries()` lists."""

    hits: int
    misses: int
    tokens_served: int
    nbytes: int
    entries: int


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """One stored prefix that no longer one covers.

    Attributes:
        length: tokens from the start of the prompt.
        nbytes: memory that dropping it frees; what it shares with other prefixes is not counted.
        last_use: seconds since the epoch; 0 when it was not used since the start.
        on_disk: it survives a restart.
        label: under which it is found.
    """

    prefix_id: str
    length: int
    nbytes: int
    hits: int
    last_use: float
    on_disk: bool
    label: CacheLabel = SHARED


class _Record(Entry):
    """The arrays of one node: token keys and values, or a state. They are in memory, on disk, or both."""

    def __init__(self, owner: PrefixCache, node: _Node, kind: Literal["tokens", "state"], nbytes: int) -> None:
        super().__init__(nbytes)
        self.owner = owner
        self.node = node
        self.kind = kind
        self.key = node.digest.hex() + ("-state" if kind == "state" else "")
        self.arrays: Arrays | None = None

    def evictable(self) -> bool:
        return self.kind == "state" or not any(record.held for record in self.node.dependants())

    def evict(self) -> None:
        self.owner._evict(self)


class _Node:
    """Tokens [end - len(tokens), end) below a parent that holds all tokens before them."""

    def __init__(self, parent: _Node | None, tokens: Tokens, digest: bytes, label: CacheLabel) -> None:
        self.parent = parent
        self.label = label
        self.tokens = tokens
        self.digest = digest
        self.first = int(tokens[0]) if tokens.size else -1
        self.end: int = tokens.size + (parent.end if parent else 0)
        self.children: dict[bytes, _Node] = {}
        self.record: _Record | None = None  # None for the root only
        self.state: _Record | None = None
        self.removed = False

    def dependants(self) -> Iterator[_Record]:
        """Records that are useless without this node's."""
        if self.state is not None:
            yield self.state
        yield from (child.record for child in self.children.values() if child.record is not None)

    def common(self, wanted: Tokens) -> list[tuple[int, _Node]]:
        """Children that start as `wanted` goes on after this node, each with how many tokens they share."""
        rest = wanted[self.end :]
        first = int(rest[0]) if rest.size else None
        return [(_common(child.tokens, rest), child) for child in self.children.values() if child.first == first]

    def records(self) -> list[_Record]:
        return [record for record in (self.record, self.state) if record is not None]

    def path(self) -> list[_Node]:
        """From the first block to this node."""
        nodes: list[_Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[_Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class _Match:
    """The node whose tokens, up to `length`, lie on the wanted prompt."""

    node: _Node
    length: int


class PrefixCache:
    """Dense prefixes of one model.

    Args:
        identity: of the model, from `model_identity`; another identity never sees these prefixes.
        make_cache: makes the model's empty prompt cache; hits come back as such caches.
        budget: bytes in memory, possibly shared with other caches.
        disk: where prefixes outlive memory and the process; None for memory only.
        block_size: tokens per block.

    Attributes:
        refusal: why this model's caches can't be kept; `lookup` then finds and `store` does nothing. Else None.
        hits, misses, tokens_served: of look-ups since the start.
    """

    def __init__(
        self,
        identity: str,
        make_cache: Callable[[], list[Any]],
        budget: ByteBudget,
        disk: DiskTier | None = None,
        block_size: int = 256,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        self.block_size = block_size
        self._identity = identity
        self._namespace = f"{identity}:{block_size}"
        self._layout = Layout(make_cache)
        self.refusal = self._layout.refusal
        self._budget = budget
        self._disk = disk
        self._roots: dict[CacheLabel, _Node] = {}  # without those that nothing hangs on
        self.hits = self.misses = self.tokens_served = 0
        self._swept = 0  # disk evictions that the tree knows of
        if self.refusal is not None:
            log.warning("no prefix cache: %s", self.refusal)
        elif disk is not None:
            ours = [name for name in disk.namespaces() if self._label_of(name) is not None]
            self._adopt([row for name in ours for row in disk.rows(name)])

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for node in self._nodes() for record in node.records() if record.held)

    # -- reading

    def lookup(
        self,
        tokens: Sequence[int],
        limit: int | None = None,
        again: bool = False,
        label: CacheLabel = SHARED,
    ) -> PrefixHit | None:
        """The longest stored prefix of `tokens`, at most `limit` tokens of it.

        Args:
            limit: a prompt's last token has to be fed for its logits, so callers pass one less than the prompt.
            again: for a request that looked up before (a retry, background work); then what it finds does not count as
                wanted by one request more, and the statistics stay as they are.
            label: only what was stored under it is looked at.
        """
        self._budget.begin_lookup()
        if self._disk is not None:
            self._disk.begin()
        wanted = np.asarray(tokens, dtype=np.int32)[:limit]
        while self.refusal is None and (root := self._roots.get(label)) is not None:
            match = self._deepest_state(root, wanted) if self._layout.stateful else self._longest(root, wanted)
            if match is None:
                break
            hit = self._serve(match, again)
            if hit is not None:
                self.hits += not again
                self.tokens_served += 0 if again else hit.length
                return hit
        self.misses += not again
        return None

    def covers(self, tokens: Sequence[int], label: CacheLabel = SHARED) -> int:
        """How many tokens `lookup` would find. Nothing is read or counted by it."""
        root, wanted = self._roots.get(label), np.asarray(tokens, dtype=np.int32)
        if root is None:
            return 0
        match = self._deepest_state(root, wanted) if self._layout.stateful else self._longest(root, wanted)
        return 0 if match is None else match.length

    def _longest(self, root: _Node, wanted: Tokens) -> _Match | None:
        """Follow the prompt as far as it goes, into the middle of a block if need be."""
        node = root
        while True:
            count, child = max(node.common(wanted), key=lambda match: match[0], default=(0, node))
            if count == 0:
                return _Match(node, node.end) if node is not root else None
            if count < self.block_size:
                return _Match(child, node.end + count)
            node = child

    def _deepest_state(self, root: _Node, wanted: Tokens) -> _Match | None:
        """The longest prefix that ends in a stored state."""
        node = root
        best: _Node | None = None
        while True:
            whole = [child for count, child in node.common(wanted) if count == child.tokens.size]
            best = max((child for child in whole if child.state is not None), key=lambda child: child.end, default=best)
            block = next((child for child in whole if child.tokens.size == self.block_size), None)
            if block is None:
                return None if best is None else _Match(best, best.end)
            node = block

    def _serve(self, match: _Match, again: bool) -> PrefixHit | None:
        """The matched prefix as a prompt cache; None when a part could not be read, which is then forgotten."""
        path = match.node.path()
        records = [node.record for node in path if node.record is not None]
        if self._layout.stateful and match.node.state is not None:
            records.append(match.node.state)
        loaded = []
        for record in records:
            arrays = record.arrays if record.arrays is not None else self._read(record)
            if arrays is None:
                self._forget(record)
                return None
            loaded.append(arrays)
        state = loaded[len(path)] if len(loaded) > len(path) else None
        cache = self._layout.build(loaded[: len(path)], state, match.length)
        for record in records:
            self._budget.touch(record, hit=not again)
        for record, arrays in zip(records, loaded, strict=True):
            self._keep(record, arrays)
        if self._disk is not None:
            self._disk.touch([record.key for record in records])
        return PrefixHit(match.length, cache)

    def _read(self, record: _Record) -> Arrays | None:
        return None if self._disk is None else self._disk.read(record.key, self._namespace_of(record.node.label))

    # -- writing

    def store(
        self, tokens: Sequence[int], cache: Sequence[Any], checkpoint: bool = True, label: CacheLabel = SHARED
    ) -> None:
        """Remember what a dense prefill of `tokens` left in `cache`. Known blocks are not copied again.

        May be called as the prefill goes on, with more tokens each time. The cache is not changed and stays the
        caller's. Without room, the longest prefix for which there is room is kept.

        Args:
            tokens: exactly what the cache holds.
            checkpoint: keep the state of layers that can't be trimmed. Without it nothing is stored for a model that
                has such layers: its blocks are of no use before the next state, which brings them along.
            label: under which alone it will be found.

        Raises:
            ValueError: the cache is sparse or does not hold that many tokens.
        """
        if self.refusal is not None:
            return
        ids = np.asarray(tokens, dtype=np.int32)
        self._layout.check(cache, ids.size)
        if ids.size == 0 or (self._layout.stateful and not checkpoint):
            return
        self._budget.begin_store()
        if self._disk is not None:
            self._disk.begin()
        self._sweep()
        root = self._roots.get(label) or self._new_root(label)
        try:
            self._grow(root, ids, cache)
        finally:
            if root.children:
                self._roots[label] = root

    def _grow(self, root: _Node, ids: Tokens, cache: Sequence[Any]) -> None:
        """Hang what is missing of these tokens below a label's root."""
        node = self._known(root, ids)
        self._touch_path(node)
        if self._layout.stateful and not self._room_for_all(node, ids.size, cache):
            return
        while node.end < ids.size:
            following = self._extend(node, ids, cache)
            if following is None:
                return
            node = following
        if self._layout.stateful and node.state is None:
            node.state = self._admit(node, "state", self._layout.state(cache))

    def _known(self, root: _Node, ids: Tokens) -> _Node:
        """The last node on the way to these tokens that is there already."""
        node = root
        while node.end < ids.size:
            child = node.children.get(block_digest(node.digest, ids[node.end : node.end + self.block_size]))
            if child is None or not self._there(child.record):
                break
            node = child
        if node.state is not None and not self._there(node.state):
            node.state = None
        return node

    def _extend(self, parent: _Node, ids: Tokens, cache: Sequence[Any]) -> _Node | None:
        """Store the next block or tail; None when there is no room, or nothing new in it."""
        part = ids[parent.end : parent.end + self.block_size]
        siblings = parent.common(ids[: parent.end + self.block_size])
        covered = any(count == part.size and self._there(child.record) for count, child in siblings)
        if covered and not self._layout.stateful:
            return None
        node = _Node(parent, part, block_digest(parent.digest, part), parent.label)
        stale = parent.children.get(node.digest)
        if stale is not None:
            self._remove(stale)
        node.record = self._admit(node, "tokens", self._layout.delta(cache, parent.end, node.end))
        if node.record is None:
            return None
        parent.children[node.digest] = node
        if not self._layout.stateful:
            for count, child in siblings:
                if count == child.tokens.size and not child.removed:
                    self._remove(child)
        return node

    def _room_for_all(self, node: _Node, length: int, cache: Sequence[Any]) -> bool:
        """Room for the missing blocks and the state: without the state the blocks are of no use."""
        missing = nbytes_of(self._layout.delta(cache, node.end, length))
        return self._budget.reserve(missing + (nbytes_of(self._layout.state(cache)) if node.state is None else 0))

    def _admit(self, node: _Node, kind: Literal["tokens", "state"], arrays: Arrays) -> _Record | None:
        """A record in memory and on its way to disk; None when there is no room. Arrays are evaluated here only."""
        nbytes = nbytes_of(arrays)
        if not self._budget.reserve(nbytes):
            return None
        record = _Record(self, node, kind, nbytes)
        mx.eval(list(arrays.values()))
        record.arrays = arrays
        self._budget.touch(record)
        self._budget.add(record)
        self._persist(record)
        return record

    def _keep(self, record: _Record, arrays: Arrays) -> None:
        """Hold in memory what was read from disk, if there is room."""
        if record.arrays is None and not record.node.removed and self._budget.reserve(record.nbytes):
            record.arrays = arrays
            self._budget.add(record)

    def _touch_path(self, node: _Node) -> None:
        for step in node.path():
            if step.record is not None:
                self._budget.touch(step.record)
        if self._disk is not None:
            self._disk.touch(_keys(node))

    # -- letting go

    def _evict(self, record: _Record) -> None:
        """Drop the arrays; what disk does not have is gone with everything that needs it."""
        if self._disk is not None and not self._disk.has(record.key):  # it was refused when it was stored
            self._disk.touch(_keys(record.node))
            self._persist(record)
        record.arrays = None
        self._budget.remove(record)
        if not self._there(record):
            self._forget(record)
        above = record.node if record.kind == "state" else record.node.parent
        if above is not None and above.record is not None:
            self._budget.offer(above.record)

    def _forget(self, record: _Record) -> None:
        if record.kind == "tokens":
            self._remove(record.node)
            return
        record.node.state = None
        self._release(record)

    def _remove(self, node: _Node) -> None:
        """Cut a node and everything below it off the tree, in memory and on disk."""
        assert node.parent is not None
        node.parent.children.pop(node.digest, None)
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.label, None)  # clients choose labels: empty ones must not pile up
        for below in node.subtree():
            below.removed = True
            for record in below.records():
                self._release(record)
        if node.parent.record is not None:
            self._budget.offer(node.parent.record)

    def _release(self, record: _Record) -> None:
        record.arrays = None
        self._budget.remove(record)
        if self._disk is not None:
            self._disk.remove([record.key])

    # -- disk

    def _there(self, record: _Record | None) -> bool:
        if record is None:
            return False
        return record.arrays is not None or (self._disk is not None and self._disk.has(record.key))

    def _persist(self, record: _Record) -> None:
        """Queue a record for disk, after those it needs; no effect when it is there or can't be written."""
        if self._disk is None or self._disk.has(record.key):
            return
        waiting = [record]
        node = record.node if record.kind == "state" else record.node.parent
        while node is not None and node.record is not None and not self._disk.has(node.record.key):
            waiting.append(node.record)
            node = node.parent
        for item in reversed(waiting):
            if item.arrays is None or not self._disk.write(self._row(item), item.arrays):
                return

    def _row(self, record: _Record) -> DiskRow:
        node = record.node
        assert node.parent is not None
        return DiskRow(
            key=record.key,
            namespace=self._namespace_of(node.label),
            parent=node.parent.digest.hex(),
            tokens=token_bytes(node.tokens) if record.kind == "tokens" else b"",
            end=node.end,
            array_bytes=record.nbytes,
        )

    def _adopt(self, rows: Sequence[DiskRow]) -> None:
        """Hang what an earlier process left on disk into the tree; what hangs on nothing is deleted."""
        labels = {label for row in rows if (label := self._label_of(row.namespace)) is not None}
        roots = [self._new_root(label) for label in labels]
        nodes = {root.digest.hex(): root for root in roots}
        useless: list[str] = []
        for row in sorted(rows, key=lambda row: (row.end, row.key)):  # a state's key sorts after its node's
            digest = row.key.removesuffix("-state")
            if row.key != digest:
                if digest in nodes:
                    nodes[digest].state = _Record(self, nodes[digest], "state", row.array_bytes)
                else:
                    useless.append(row.key)
                continue
            parent, tokens = nodes.get(row.parent), np.frombuffer(row.tokens, dtype="<i4")
            if parent is None or block_digest(parent.digest, tokens).hex() != digest:
                useless.append(row.key)
                continue
            node = nodes[digest] = _Node(parent, tokens, bytes.fromhex(digest), parent.label)
            node.record = _Record(self, node, "tokens", row.array_bytes)
            parent.children[node.digest] = node
        self._roots = {root.label: root for root in roots if root.children}
        if self._disk is not None and useless:
            log.info("%d stored records without the blocks before them are deleted", len(useless))
            self._disk.remove(useless)

    def _sweep(self) -> None:
        """Forget what the disk tier evicted by itself and memory does not have."""
        if self._disk is None or self._disk.evictions == self._swept:
            return
        self._swept = self._disk.evictions
        for node in list(self._nodes()):
            if not node.removed and not self._there(node.record):
                self._remove(node)
            elif node.state is not None and not self._there(node.state):
                node.state = None

    # -- for people

    def stats(self) -> PrefixStats:
        return PrefixStats(self.hits, self.misses, self.tokens_served, self.nbytes, len(self._ends()))

    def entries(self) -> list[PrefixEntry]:
        """The stored prefixes, last used first."""
        entries = [self._entry(node) for node in self._ends()]
        return sorted(entries, key=lambda entry: entry.last_use, reverse=True)

    def drop(self, prefix_id: str, owner: str | None = None) -> bool:
        """Forget a prefix and what only it needs, in memory and on disk; False when there is none of that name.

        Args:
            owner: drop it only if it is theirs.
        """
        node = next((node for node in self._ends() if node.digest.hex() == prefix_id), None)
        if node is None or owner not in (None, node.label.owner):
            return False
        if node.state is not None:
            self._forget(node.state)
        for step in reversed(node.path()):
            if step.children or step.state is not None:
                break
            self._remove(step)
        return True

    def clear(self, owner: str | None = None) -> None:
        """Forget everything, or everything of one owner, in memory and on disk."""
        for label, root in list(self._roots.items()):
            if owner in (None, label.owner):
                for node in list(root.children.values()):
                    self._remove(node)

    def _nodes(self) -> Iterator[_Node]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    # -- labels

    def _new_root(self, label: CacheLabel) -> _Node:
        identity = self._identity if label == SHARED else f"{self._identity}{_AT}{label.owner}/{label.salt}"
        return _Node(None, np.zeros(0, dtype=np.int32), root_digest(identity, self.block_size), label)

    def _namespace_of(self, label: CacheLabel) -> str:
        return self._namespace if label == SHARED else f"{self._namespace}{_AT}{label.owner}/{label.salt}"

    def _label_of(self, namespace: str) -> CacheLabel | None:
        """None: it is another model's, or was made with another block size."""
        own, _, label = namespace.partition(_AT)
        owner, _, salt = label.partition("/")
        return CacheLabel(owner, salt) if own == self._namespace else None

    def _ends(self) -> list[_Node]:
        """Nodes that a prefix of its own ends in."""
        if self._layout.stateful:
            return [node for node in self._nodes() if self._there(node.state)]
        return [node for node in self._nodes() if not node.children and self._there(node.record)]

    def _entry(self, node: _Node) -> PrefixEntry:
        newest = node.state or node.record
        assert newest is not None
        own = node.records() if not node.children else [newest]
        for step in reversed(node.path()[:-1]):
            if node.children or len(step.children) > 1 or step.state is not None:
                break
            own += step.records()
        return PrefixEntry(
            prefix_id=node.digest.hex(),
            length=node.end,
            nbytes=sum(record.nbytes for record in own if record.held),
            hits=newest.hits,
            last_use=newest.seen_at,
            on_disk=self._disk is not None and self._disk.has(newest.key),
            label=node.label,
        )


def _keys(node: _Node) -> list[str]:
    """Disk keys of the blocks up to and with this node."""
    return [step.record.key for step in node.path() if step.record is not None]


def _common(tokens: Tokens, other: Tokens) -> int:
    """How many tokens the two have in common from their start."""
    count = min(tokens.size, other.size)
    differing = np.flatnonzero(tokens[:count] != other[:count])
    return int(differing[0]) if differing.size else count
