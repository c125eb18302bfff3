"""Prefixes of earlier prompts: which blocks and states are stored, found, pinned, listed and dropped.

A tree of token blocks per model and label. Layers that can't be trimmed (recurrent, rotating) add a state at the
lengths at which `store` saw one; a model with such layers is served at those lengths only. A dense prefix serves every
prompt, a sparse one only prompts with the same selection rule. Everything runs on the MLX thread. `stored.py` adds a
disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import mlx.core as mx
import numpy as np

from ...request import SHARED, CacheLabel, TokenIds
from ..budget import ByteBudget
from ..held import HeldTokens
from ..positioned import PositionedKVCache, leaves
from .identity import block_digest
from .layout import Arrays, Layout, nbytes_of
from .nodes import (
    CacheEntry,
    CacheHit,
    Match,
    Node,
    Record,
    RecordKind,
    common_length,
    deepest_state,
    longest_match,
    make_root,
    others_ends,
)
from .selection_key import Accepts, SelectionKey, accepted_by

log = logging.getLogger(__name__)
T = TypeVar("T")
Restoring = Generator[None, None, T]  # yields between two reads
_WORTH_KEEPING = 128  # tokens of a sparse prefix before its first gap
_OTHERS = 3  # prefixes to which a prompt is compared
_ROOM = 2048  # tokens: a forward reads no more at once


def finish(steps: Generator[Any, None, T]) -> T:
    """Return what the steps return, without a stop."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


@dataclass(frozen=True)
class _Source:
    """A cache to store blocks from; `held` and `selection_key` are None if it is dense."""

    cache: Sequence[Any]
    held: HeldTokens | None
    selection_key: SelectionKey | None

    def chosen(self, start: int, end: int) -> tuple[SelectionKey | None, TokenIds | None]:
        """Return selection key and positions of the block [start, end)."""
        positions = None if self.held is None else self.held.within(start, end)
        return None if positions is None else self.selection_key, positions

    def delta(self, layout: Layout, start: int, end: int) -> Arrays:
        """Return the arrays of the block [start, end)."""
        if self.held is None:
            return layout.delta(self.cache, start, end)
        return layout.delta(self.cache, self.held.slots(start), self.held.slots(end))


def held_by(cache: Sequence[Any]) -> HeldTokens:
    """Return the tokens that a positioned cache holds, from its first layer that drops none.

    Raises:
        ValueError: it has no such layer.
    """
    full = [part for part in leaves(cache) if isinstance(part, PositionedKVCache) and not part.empty()]
    if not full:
        raise ValueError("no layer of the cache holds all that it has read")
    return min((part.held for part in full), key=lambda held: held.size)


def _covers(node: Node, other: Node) -> bool:
    """Return whether a block holds all tokens of a sibling with the same selection key, and others only behind them."""
    same = common_length(node.tokens, other.tokens) == other.tokens.size
    return same and (node.positions is None or common_length(node.positions, other.fed) == other.fed.size)


def _held_by(match: Match) -> tuple[HeldTokens, int]:
    """Return the tokens of a match, and the number of excess tokens in its blocks."""
    if match.held is None:
        return HeldTokens.all(match.length), match.node.end - match.length
    held = HeldTokens.of(match.held.marked[: match.held.slots(match.length)])
    return held, match.held.size - held.size


class PrefixCache:
    """Prefixes of one model, in memory.

    Args:
        identity: of the model, from `model_identity`; another identity never sees these prefixes.
        make_cache: makes the model's empty prompt cache; hits come back as such caches.
        budget: bytes in memory, possibly shared with other caches.
        block_size: tokens per block.
        kind: of the entries in `entries`.

    Attributes:
        refusal: why this model's caches can't be kept; then `lookup` finds and `store` does nothing. Else None.
        hits, misses, tokens_served: of look-ups since the start.
    """

    def __init__(
        self,
        identity: str,
        make_cache: Callable[[], list[Any]],
        budget: ByteBudget,
        block_size: int = 256,
        kind: Literal["target", "draft"] = "target",
    ) -> None:
        self._identity = identity
        self.block_size = block_size
        self._kind = kind
        self._layout = Layout(make_cache)
        self._find = deepest_state if self._layout.stateful else longest_match
        self.refusal = self._layout.refusal
        self._budget = budget
        self._roots: dict[CacheLabel, Node] = {}  # without empty trees
        self.hits = self.misses = self.tokens_served = 0
        if self.refusal is not None:
            log.warning("no prefix cache: %s", self.refusal)

    @property
    def nbytes(self) -> int:
        return sum(record.nbytes for node in self._nodes() for record in node.records() if record.held)

    # -- reading

    def lookup(self, *wanted: Any, **how: Any) -> CacheHit | None:
        """Return what `restore` does, without a stop."""
        return finish(self.restore(*wanted, **how))

    def restore(
        self,
        tokens: Sequence[int] | TokenIds,
        limit: int | None = None,
        again: bool = False,
        label: CacheLabel = SHARED,
        selection_key: SelectionKey | None = None,
    ) -> Restoring[CacheHit | None]:
        """Return the longest stored prefix of `tokens`, at most `limit` tokens of it. Anything may be stored or removed
        where it yields.

        Args:
            limit: a prompt's last token has to be fed for its logits, so callers pass one less than the prompt.
            again: the same request looked up before (a retry, background work): it does not count as a hit, and the
                statistics stay unchanged.
            label: the search is limited to prefixes stored under it.
            selection_key: sparse prefixes that it accepts are searched, too.
        """
        self._budget.begin_lookup()
        self._begin()
        wanted = np.asarray(tokens, dtype=np.int32)[:limit]
        while (match := self._match(wanted, label, selection_key)) is not None:
            hit = yield from self._serve(match, min(len(tokens) - match.length, _ROOM), again)
            if hit is not None:
                self.hits += not again
                self.tokens_served += 0 if again else hit.length
                return hit
        self.misses += not again
        return None

    def covers(
        self, tokens: Sequence[int] | TokenIds, label: CacheLabel = SHARED, selection_key: SelectionKey | None = None
    ) -> int:
        """Return the number of tokens that `lookup` would find. Reads and counts nothing."""
        match = self._match(np.asarray(tokens, dtype=np.int32), label, selection_key)
        return 0 if match is None else match.length

    def records(self, tokens: Sequence[int] | TokenIds, label: CacheLabel = SHARED) -> list[Record]:
        """Return the records of the longest stored prefix, however its tokens were chosen. Reads and counts nothing."""
        root = self._roots.get(label)
        match = None if root is None else self._find(root, np.asarray(tokens, dtype=np.int32), lambda _: True)
        if match is None:
            return []
        return match.node.blocks() + ([] if match.node.state is None else [match.node.state])

    def held(
        self, tokens: Sequence[int] | TokenIds, label: CacheLabel = SHARED, selection_key: SelectionKey | None = None
    ) -> tuple[int, HeldTokens]:
        """Return the length that `lookup` would find, and the tokens held of it. Reads and counts nothing."""
        match = self._match(np.asarray(tokens, dtype=np.int32), label, selection_key)
        return (0, HeldTokens()) if match is None else (match.length, _held_by(match)[0])

    def others(
        self, tokens: TokenIds, label: CacheLabel, accepts: Accepts = lambda _: True, less: int = 0
    ) -> tuple[int, list[TokenIds]]:
        """Return the length that a prompt shares with any stored prefix, and the tokens of those that share it, or up
        to `less` tokens less, and go on otherwise: the last used ones first. Reads and counts nothing.

        Args:
            accepts: returns whether sparse ones with a key count.
        """
        root = self._roots.get(label)
        if root is None:
            return 0, []
        shared, ends = others_ends(root, tokens, _OTHERS, accepts, less)
        return shared, [np.concatenate([node.tokens for node in end.path()]) for end in ends]

    def _match(self, wanted: TokenIds, label: CacheLabel, selection_key: SelectionKey | None) -> Match | None:
        root = self._roots.get(label)
        if root is None:
            return None
        match = self._find(root, wanted, accepted_by(selection_key))
        if match is None or match.node.selection_key is None:
            return match
        held = HeldTokens.of(np.concatenate([step.fed for step in match.node.path()]))
        if held.dense < match.length:
            return replace(match, held=held)
        # nothing is thinned so far, so it is no turn of this conversation
        return self._find(root, wanted, accepted_by(None))

    def _serve(self, match: Match, room: int, again: bool) -> Restoring[CacheHit | None]:
        """Return the matched prefix as a prompt cache with room for `room` more tokens.

        Returns None if a part could not be read; that part is removed.
        """
        records = match.node.blocks()
        count = len(records)
        if self._layout.stateful and match.node.state is not None:
            records.append(match.node.state)
        loaded = []
        for record, arrays in zip(records, (yield from self._load(records)), strict=True):
            if arrays is None:
                if not record.node.removed:
                    self._forget(record)
                return None
            loaded.append(arrays)
        state = loaded[count] if len(loaded) > count else None
        held, excess = _held_by(match)
        cache = self._layout.build(loaded[:count], excess, state, match.length, held, room)
        self._touch(records, hit=not again)
        for record, arrays in zip(records, loaded, strict=True):
            self._keep(record, arrays)
        self._save(records)  # at the second use of a pinned prefix, if only those are written
        return CacheHit(match.length, cache, held)

    # -- writing

    def store(
        self,
        tokens: Sequence[int] | TokenIds,
        cache: Sequence[Any],
        label: CacheLabel = SHARED,
        system_prefix_len: int = 0,
        state: Arrays | None = None,
        selection_key: SelectionKey | None = None,
        beside: Sequence[Record] = (),
    ) -> bool:
        """Store the cache of a prefill of `tokens`. Known blocks are not copied again.

        May be called as the prefill goes on, with more tokens each time. The cache is not changed and stays the
        caller's. Stores the longest prefix for which there is room.

        Args:
            tokens: exactly those that the cache covers.
            label: needed to find it.
            system_prefix_len: number of leading tokens that many conversations share. Blocks within them are pinned:
                once used a second time, they are evicted last, in memory and on disk.
            state: the result of `state` after these tokens, if the cache holds more by now.
            selection_key: says how the tokens were chosen. None: the cache holds all.
            beside: records that must not be evicted for it.

        Returns:
            Whether it had room for all of them.

        Raises:
            ValueError: the cache is sparse without a selection key, or does not hold that many tokens.
        """
        if self.refusal is not None:
            return True
        ids = np.asarray(tokens, dtype=np.int32)
        if selection_key is None:
            self._layout.check(cache, ids.size, more=state is not None)
        if ids.size == 0:
            return True
        source = _Source(cache, None if selection_key is None else held_by(cache), selection_key)
        self._budget.begin_store()
        for record in reversed(beside):
            self._budget.touch(record)
        self._begin()
        root = self._roots.get(label) or self._make_root(label)
        try:
            dense = 0 if source.held is None or self._layout.stateful else source.held.dense
            if dense >= _WORTH_KEEPING:
                self._grow(root, ids[:dense], source, {})  # for dense requests
            self._grow(root, ids, source, self._layout.state(cache) if state is None else state)
        finally:
            if root.children:
                self._roots[label] = root
        self._pin_system_prefix(root, ids[:system_prefix_len])
        return self.covers(ids, label, selection_key) == ids.size

    def state(self, cache: Sequence[Any]) -> Arrays:
        """Return the state of layers that can't be trimmed, for a `store` after later forwards. Not evaluated."""
        return {} if self.refusal is not None else self._layout.state(cache)

    def _grow(self, root: Node, ids: TokenIds, source: _Source, state: Arrays) -> None:
        """Add the missing blocks of these tokens below a label's root, evaluated together: each evaluation waits."""
        added: list[Record] = []
        try:
            added.extend(self._missing(root, ids, source, state))
            mx.eval([record.arrays for record in added])
        except Exception:
            for record in added:
                self._forget(record)
            raise
        self._save(added)

    def _missing(self, root: Node, ids: TokenIds, source: _Source, state: Arrays) -> Iterator[Record]:
        """Yield their records while there is room, in memory but not evaluated."""
        node = self._last_stored(root, ids, source)
        self._touch(node.blocks())
        if self._layout.stateful and not self._room_for_all(node, ids.size, source, state):
            return
        while node.end < ids.size:
            following = self._extend(node, ids, source)
            if following is None or following.record is None:
                return
            yield following.record
            node = following
        if self._layout.stateful and node.state is None:
            node.state = self._admit(node, "state", state)
            if node.state is not None:
                yield node.state

    def _pin_system_prefix(self, root: Node, system_prefix: TokenIds) -> None:
        """Pin the stored blocks within the system prefix."""
        for node in self._last_stored(root, system_prefix).path():
            for record in node.records():
                self._budget.touch(record, pin=True)
            self._save(node.records())

    def _last_stored(self, root: Node, ids: TokenIds, source: _Source | None = None) -> Node:
        """Return the last stored node on the path of these tokens."""
        node = root
        while node.end < ids.size:
            part = ids[node.end : node.end + self.block_size]
            chosen = (None, None) if source is None else source.chosen(node.end, node.end + part.size)
            child = node.children.get(block_digest(node.digest, part, *chosen))
            if child is None or not self._there(child.record):
                break
            node = child
        if node.state is not None and not self._there(node.state):
            node.state = None
        return node

    def _extend(self, parent: Node, ids: TokenIds, source: _Source) -> Node | None:
        """Store the next block or tail; return None if there is no room, or nothing new in it."""
        part = ids[parent.end : parent.end + self.block_size]
        selection_key, positions = source.chosen(parent.end, parent.end + part.size)
        digest = block_digest(parent.digest, part, selection_key, positions)
        node = Node(parent, part, digest, parent.label, selection_key, positions)
        siblings = [child for child in parent.children.values() if child.selection_key == selection_key]
        if not self._layout.stateful and any(_covers(child, node) and self._there(child.record) for child in siblings):
            return None
        stale = parent.children.get(node.digest)
        if stale is not None:
            self._remove(stale)
        node.record = self._admit(node, "tokens", source.delta(self._layout, node.end - part.size, node.end))
        if node.record is None:
            return None
        parent.children[node.digest] = node
        if not self._layout.stateful:
            for child in siblings:
                if not child.removed and _covers(node, child):
                    self._remove(child)
        return node

    def _room_for_all(self, node: Node, length: int, source: _Source, state: Arrays) -> bool:
        """Make room for the missing blocks and the state: without the state the blocks are useless."""
        missing = nbytes_of(source.delta(self._layout, node.end, length))
        return self._budget.reserve(missing + (nbytes_of(state) if node.state is None else 0))

    def _record(self, node: Node, kind: RecordKind, nbytes: int) -> Record:
        return Record(node, kind, nbytes, self._evict)

    def _admit(self, node: Node, kind: RecordKind, arrays: Arrays) -> Record | None:
        """Return a record in memory; None if there is no room."""
        nbytes = nbytes_of(arrays)
        if not self._budget.reserve(nbytes):
            return None
        record = self._record(node, kind, nbytes)
        record.arrays = arrays
        self._budget.add(record)
        return record

    def _keep(self, record: Record, arrays: Arrays) -> None:
        """Keep a record read from disk in memory, if there is room."""
        if record.arrays is None and not record.node.removed and self._budget.reserve(record.nbytes):
            record.arrays = arrays
            self._budget.add(record)

    # -- eviction

    def _evict(self, record: Record) -> None:
        """Drop the arrays. A record that is not stored is removed, with all that need it."""
        record.arrays = None
        self._budget.remove(record)
        if not self._there(record):
            self._forget(record)

    def _forget(self, record: Record) -> None:
        if record.kind == "tokens":
            self._remove(record.node)
            return
        record.node.state = None
        self._release(record)

    def _remove(self, node: Node) -> None:
        """Remove a node and its subtree, in memory and on disk."""
        assert node.parent is not None
        node.parent.children.pop(node.digest, None)
        if node.parent.parent is None and not node.parent.children:
            self._roots.pop(node.label, None)  # clients choose labels: empty ones must not accumulate
        for below in list(node.subtree()):
            below.removed = True
            for record in below.records():
                self._release(record)
            below.children, below.record, below.state = {}, None, None  # a cycle would keep the tokens

    def _release(self, record: Record) -> None:
        record.arrays = None
        self._budget.remove(record)

    def _there(self, record: Record | None) -> bool:
        return record is not None and (record.arrays is not None or self._is_stored(record))

    # -- what a cache on disk adds to

    def _begin(self) -> None:
        """Begin a look-up or a store."""

    def _is_stored(self, record: Record) -> bool:
        """Return whether the record outlives memory."""
        return False

    def _load(self, records: Sequence[Record]) -> Restoring[list[Arrays | None]]:
        """Return the arrays of one label's records in this order; None for a record that can't be read."""
        yield from ()
        return [record.arrays for record in records]

    def _touch(self, records: Sequence[Record], hit: bool = False) -> None:
        """Note that the records are used now."""
        for record in reversed(records):  # of entries used at once the last one goes first, which no other needs
            self._budget.touch(record, hit=hit)

    def _save(self, records: Sequence[Record]) -> None:
        """Let the records outlive memory."""

    # -- inspection

    def entries(self) -> list[CacheEntry]:
        """Return the prefixes that no longer prefix covers, most recently used first."""
        entries = [self._entry(node) for node in self._ends()]
        return sorted(entries, key=lambda entry: entry.last_use, reverse=True)

    def drop(self, entry_id: str, owner: str | None = None) -> bool:
        """Remove a prefix and the blocks that only it needs, in memory and on disk; return False if there is none of
        that name.

        Args:
            owner: remove it only if it belongs to this owner.
        """
        node = next((node for node in self._ends() if node.digest.hex() == entry_id), None)
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
        """Remove everything, or everything of one owner, in memory and on disk."""
        for label, root in list(self._roots.items()):
            if owner in (None, label.owner):
                for node in list(root.children.values()):
                    self._remove(node)

    def _make_root(self, label: CacheLabel) -> Node:
        """Return an empty tree for a label."""
        return make_root(self._identity, self.block_size, label)

    def _nodes(self) -> Iterator[Node]:
        return (node for root in self._roots.values() for node in root.subtree() if node is not root)

    def _ends(self) -> list[Node]:
        """Return the nodes at the end of a prefix."""
        if self._layout.stateful:
            return [node for node in self._nodes() if self._there(node.state)]
        return [node for node in self._nodes() if not node.children and self._there(node.record)]

    def _entry(self, node: Node) -> CacheEntry:
        newest = node.state or node.record
        assert newest is not None
        own = node.records() if not node.children else [newest]
        for step in reversed(node.path()[:-1]):
            if node.children or len(step.children) > 1 or step.state is not None:
                break
            own += step.records()
        return CacheEntry(
            id=node.digest.hex(),
            kind=self._kind if node.selection_key is None else "session",
            tokens=node.end,
            nbytes=sum(record.nbytes for record in own if record.held),
            hits=newest.hits,
            last_use=newest.seen_at,
            on_disk=self._is_stored(newest),
            label=node.label,
        )
