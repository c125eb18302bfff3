"""The tree of token blocks: what a node holds, and how a prompt is followed through it.

A full block hangs below the block before it, a shorter tail below the last full block. Each holds the keys and values
of its own tokens only, so prompts share what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ...request import CacheLabel
from ..budget import Evictable
from ..fingerprint import common_length
from .records import Arrays

__all__ = ["Match", "Node", "Record", "RecordKind", "deepest_state", "longest_match"]

Tokens = npt.NDArray[np.int32]
RecordKind = Literal["tokens", "state"]


class Record(Evictable):
    """The arrays of one node: the keys and values of its tokens, or a state. In memory, on disk, or both."""

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
        """Whether the budget counts it."""
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


class Node:
    """Tokens [end - len(tokens), end) below a parent that holds all tokens before them."""

    def __init__(self, parent: Node | None, tokens: Tokens, digest: bytes, label: CacheLabel) -> None:
        self.parent = parent
        self.label = label
        self.tokens = tokens
        self.digest = digest
        self.first = int(tokens[0]) if tokens.size else -1
        self.end: int = tokens.size + (parent.end if parent else 0)
        self.children: dict[bytes, Node] = {}
        self.record: Record | None = None  # None for the root only
        self.state: Record | None = None
        self.held_dependants = 0  # records in memory that are useless without this node's: its state, its children's
        self.removed = False

    def common(self, wanted: Tokens) -> list[tuple[int, Node]]:
        """Children that start as `wanted` goes on after this node, each with how many tokens they share."""
        rest = wanted[self.end :]
        first = int(rest[0]) if rest.size else None
        return [(common_length(child.tokens, rest), child) for child in self.children.values() if child.first == first]

    def records(self) -> list[Record]:
        return [record for record in (self.record, self.state) if record is not None]

    def path(self) -> list[Node]:
        """From the first block to this node."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def blocks(self) -> list[Record]:
        """The records of tokens on the path to this node."""
        return [node.record for node in self.path() if node.record is not None]

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class Match:
    """The node whose tokens, up to `length`, lie on the wanted prompt."""

    node: Node
    length: int


def longest_match(root: Node, wanted: Tokens, block_size: int) -> Match | None:
    """Follow the prompt as far as it goes, into the middle of a block if need be."""
    node = root
    while True:
        count, child = max(node.common(wanted), key=lambda match: match[0], default=(0, node))
        if count == 0:
            return Match(node, node.end) if node is not root else None
        if count < block_size:
            return Match(child, node.end + count)
        node = child


def deepest_state(root: Node, wanted: Tokens, block_size: int) -> Match | None:
    """The longest prefix that ends in a stored state."""
    node = root
    best: Node | None = None
    while True:
        whole = [child for count, child in node.common(wanted) if count == child.tokens.size]
        best = max((child for child in whole if child.state is not None), key=lambda child: child.end, default=best)
        block = next((child for child in whole if child.tokens.size == block_size), None)
        if block is None:
            return None if best is None else Match(best, best.end)
        node = block
