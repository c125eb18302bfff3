"""The nodes of the tree of token blocks, and the search for the longest stored prefix of a prompt.

A full block hangs below the block before it, a shorter tail below the last full block. Each holds the keys and values
of its own tokens only, so prompts share common blocks. A sparse prefill leaves out tokens, and may read earlier ones
later. A sparse block lists the tokens that it holds, and is found only by requests with the same selection rule.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ...request import SHARED, CacheLabel, TokenIds
from ..budget import Evictable
from ..held import HeldTokens
from .identity import DIGEST_BYTES, labelled
from .layout import Arrays
from .selection_key import Accepts, SelectionKey

CacheKind = Literal["target", "draft", "session"]
RecordKind = Literal["tokens", "state"]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cached prefix without its content.

    Attributes:
        id: identifies it in `Engine.drop_cached`; a digest that reveals no token.
        kind: a dense prefix of the target or of the draft, or a sparse session.
        tokens: from the start of the prompt, dropped ones included.
        nbytes: memory that dropping it frees, without parts shared with other prefixes.
        hits: requests that used it.
        last_use: seconds since the epoch; 0 if it was not used since the start.
        on_disk: it survives a restart.
        label: under which it is found.
    """

    id: str
    kind: CacheKind
    tokens: int
    nbytes: int
    hits: int
    last_use: float
    on_disk: bool = False
    label: CacheLabel = SHARED


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A found prefix. `cache` covers exactly the first `length` tokens and belongs to the caller.

    Attributes:
        held: the tokens that it holds.
    """

    length: int
    cache: list[Any]
    held: HeldTokens


class Record(Evictable):
    """The arrays of one node: keys and values of its tokens, or a state. In memory, on disk, or both."""

    def __init__(self, node: Node, kind: RecordKind, nbytes: int, on_evict: Callable[[Record], None]) -> None:
        self.node = node
        self.kind = kind
        self._held = False
        super().__init__(nbytes)
        self.key = node.digest.hex() + ("-state" if kind == "state" else "")
        self.arrays: Arrays | None = None
        self._on_evict = on_evict

    @property
    def held(self) -> bool:
        """Return whether the budget counts it."""
        return self._held

    @held.setter
    def held(self, held: bool) -> None:
        needed = self.node if self.kind == "state" else self.node.parent
        if needed is not None:
            needed.held_dependants += held - self._held
        self._held = held

    def evictable(self) -> bool:
        return self.kind == "state" or not self.node.held_dependants

    def evict(self) -> None:
        self._on_evict(self)


@dataclass(eq=False)
class Node:
    """TokenIds [end - len(tokens), end) below a parent that covers all tokens before them.

    Attributes:
        selection_key: how its tokens were chosen; None: it is dense.
        positions: of a sparse block, as in `HeldTokens.within`.
    """

    parent: Node | None
    tokens: TokenIds
    digest: bytes
    label: CacheLabel
    selection_key: SelectionKey | None = None
    positions: TokenIds | None = None
    children: dict[bytes, Node] = field(default_factory=dict, init=False)
    record: Record | None = field(default=None, init=False)  # None for the root only
    state: Record | None = field(default=None, init=False)
    held_dependants: int = field(default=0, init=False)  # records in memory that need this node's: state, children's
    removed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.first = int(self.tokens[0]) if self.tokens.size else -1
        self.end: int = self.tokens.size + (self.parent.end if self.parent else 0)

    @property
    def fed(self) -> TokenIds:
        """Return the positions of its tokens, as in `HeldTokens.within`."""
        if self.positions is not None:
            return self.positions
        return np.arange(self.end - self.tokens.size, self.end, dtype=np.int32)

    @property
    def seen_at(self) -> float:
        """Return when it was last used, in seconds since the epoch."""
        return 0.0 if self.record is None else self.record.seen_at

    def common(self, wanted: TokenIds, accepts: Accepts) -> list[tuple[int, Node]]:
        """Return the children that share tokens with `wanted` after this node, with the number of shared tokens.

        Args:
            accepts: returns whether sparse children with a key count.
        """
        rest = wanted[self.end :]
        first = int(rest[0]) if rest.size else None
        return [
            (common_length(child.tokens, rest), child)
            for child in self.children.values()
            if child.first == first and (child.selection_key is None or accepts(child.selection_key))
        ]

    def is_end(self, accepts: Accepts) -> bool:
        """Return whether it counts, and none of its children does, as in `common`."""
        mine, *below = (
            node.selection_key is None or accepts(node.selection_key) for node in (self, *self.children.values())
        )
        return mine and not any(below)

    def records(self) -> list[Record]:
        return [record for record in (self.record, self.state) if record is not None]

    def path(self) -> list[Node]:
        """Return the nodes from the first block to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def blocks(self) -> list[Record]:
        """Return the records of tokens on the path to this node."""
        return [node.record for node in self.path() if node.record is not None]

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class Match:
    """The node that `wanted` reaches, and the number of tokens that match.

    Attributes:
        held: what the blocks up to the node hold; None: the match is dense, or not looked at yet.
    """

    node: Node
    length: int
    held: HeldTokens | None = None


def longest_match(root: Node, wanted: TokenIds, accepts: Accepts) -> Match | None:
    """Follow the prompt as far as possible, into the middle of a block if necessary. Prefers a dense match of equal
    length.
    """
    return _best(_matches(root, wanted, accepts))


def deepest_state(root: Node, wanted: TokenIds, accepts: Accepts) -> Match | None:
    """Return the longest prefix that ends in a stored state. Prefers a dense one of equal length."""
    found = _matches(root, wanted, accepts)
    return _best(match for match in found if match.node.state is not None and match.length == match.node.end)


def _best(matches: Iterable[Match]) -> Match | None:
    return max(matches, key=lambda match: (match.length, match.node.selection_key is None), default=None)


def _matches(root: Node, wanted: TokenIds, accepts: Accepts) -> Iterator[Match]:
    """Yield all nodes that share tokens with the prompt, and all tokens before them."""
    nodes = [root]
    while nodes:
        for count, child in nodes.pop().common(wanted, accepts):
            yield Match(child, child.end - child.tokens.size + count)
            if count == child.tokens.size:
                nodes.append(child)


def others_ends(root: Node, wanted: TokenIds, most: int, accepts: Accepts, less: int = 0) -> tuple[int, list[Node]]:
    """Return the length that the prompt shares with any stored prefix, and the ends of the prefixes that share it, or
    up to `less` tokens less, and go on otherwise: the `most` recently used ones, the latest first. Sparse ones count as
    in `Node.common`.
    """
    matches = list(_matches(root, wanted, accepts)) or [Match(root, 0)]
    shared = max(match.length for match in matches)
    longest = (node for match in matches if match.length >= shared - less for node in match.node.subtree())
    ends = [node for node in dict.fromkeys(longest) if node.end > shared and node.is_end(accepts)]
    return shared, sorted(ends, key=lambda node: node.seen_at, reverse=True)[:most]


def make_root(identity: str, block_size: int, label: CacheLabel) -> Node:
    """Return an empty tree of one model for a label. Trees of another identity or block size share no digest."""
    name = f"{labelled(identity, label)}\0{block_size}"
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()
    return Node(None, np.zeros(0, dtype=np.int32), digest, label)


def common_length(tokens: TokenIds, other: TokenIds) -> int:
    """Return the length of the common prefix."""
    count, start, end = min(tokens.size, other.size), 0, 256
    while start < count:
        differ = tokens[start : min(end, count)] != other[start : min(end, count)]
        if differ.any():
            return start + int(differ.argmax())
        start, end = end, 2 * end
    return count
