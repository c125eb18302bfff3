"""The tree of token blocks: its nodes, and the search for a prompt.

A full block hangs below the block before it, a shorter tail below the last full block. Each holds the keys and values
of its own tokens only, so prompts share common blocks. A sparse prefill leaves out tokens, and may read earlier ones
later. A sparse block lists the tokens that it holds, and is found only by requests with the same selection rule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ...request import CacheLabel, TokenIds
from ..budget import Evictable
from .records import Arrays

__all__ = [
    "ANY_CHOICE",
    "KV_LAYOUT_VERSION",
    "Fed",
    "Match",
    "Node",
    "Record",
    "RecordKind",
    "block_digest",
    "common_length",
    "deepest_state",
    "longest_match",
    "model_identity",
    "root_digest",
    "token_bytes",
]

Tokens = npt.NDArray[np.int32]
RecordKind = Literal["tokens", "state"]
ANY_CHOICE = ""  # every choice begins with it


class Fed:
    """Tokens of a prompt that a cache has read.

    Attributes:
        positions: their prompt indices in the order of feeding, int32 (N,). One that is smaller than an earlier one was
            recalled, for the sake of the next one that is not.
        run: tokens before the first gap.
    """

    def __init__(self, positions: Tokens) -> None:
        self.positions = positions
        highest = np.maximum.accumulate(positions)
        self._slots = np.flatnonzero(np.append(-1, highest[:-1]) < positions)  # of the tokens that were not recalled
        self._ends = positions[self._slots]
        gaps = np.flatnonzero(positions != np.arange(positions.size))
        self.run = int(gaps[0]) if gaps.size else positions.size

    def slots(self, length: int) -> int:
        """Return the number of tokens fed when the cache covered the prompt's first `length` tokens."""
        count = int(np.searchsorted(self._ends, length))
        return int(self._slots[count - 1]) + 1 if count else 0

    def within(self, start: int, end: int) -> Tokens | None:
        """Return the positions of a block [start, end); None if the prefix up to its end is dense."""
        return None if end <= self.run else self.positions[self.slots(start) : self.slots(end)]


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


class Node:
    """Tokens [end - len(tokens), end) below a parent that covers all tokens before them.

    Attributes:
        choice: the selection rule; None: it is dense.
        positions: of a sparse block, as in `Fed`.
    """

    def __init__(
        self,
        parent: Node | None,
        tokens: Tokens,
        digest: bytes,
        label: CacheLabel,
        choice: str | None = None,
        positions: Tokens | None = None,
    ) -> None:
        self.parent = parent
        self.label = label
        self.choice = choice
        self.positions = positions
        self.tokens = tokens
        self.digest = digest
        self.first = int(tokens[0]) if tokens.size else -1
        self.end: int = tokens.size + (parent.end if parent else 0)
        self.children: dict[bytes, Node] = {}
        self.record: Record | None = None  # None for the root only
        self.state: Record | None = None
        self.held_dependants = 0  # records in memory that need this node's: its state, its children's
        self.removed = False

    @property
    def fed(self) -> Tokens:
        """Return the positions of its tokens."""
        if self.positions is not None:
            return self.positions
        return np.arange(self.end - self.tokens.size, self.end, dtype=np.int32)

    def common(self, wanted: Tokens, choice: str | None = None) -> list[tuple[int, Node]]:
        """Return the children that share tokens with `wanted` after this node, with the number of shared tokens.

        Args:
            choice: how the choices of sparse children to include begin; None: none.
        """
        rest = wanted[self.end :]
        first = int(rest[0]) if rest.size else None
        return [
            (common_length(child.tokens, rest), child)
            for child in self.children.values()
            if child.first == first
            and (child.choice is None or (choice is not None and child.choice.startswith(choice)))
        ]

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
    """The node that `wanted` reaches, and the number of tokens that match."""

    node: Node
    length: int


def longest_match(root: Node, wanted: Tokens, block_size: int, choice: str | None = None) -> Match | None:
    """Follow the prompt as far as possible, into the middle of a block if necessary. Prefers a dense match of equal
    length.
    """
    best: Match | None = None
    nodes = [root]
    while nodes:
        for count, child in nodes.pop().common(wanted, choice):
            length = child.end - child.tokens.size + count
            if best is None or (length, child.choice is None) > (best.length, best.node.choice is None):
                best = Match(child, length)
            if count == block_size:
                nodes.append(child)
    return best


def deepest_state(root: Node, wanted: Tokens, block_size: int, choice: str | None = None) -> Match | None:
    """Return the longest prefix that ends in a stored state. Prefers a dense one of equal length."""
    best: Match | None = None
    nodes = [root]
    while nodes:
        for count, child in nodes.pop().common(wanted, choice):
            if count < child.tokens.size:
                continue
            newest = best is None or (child.end, child.choice is None) > (best.length, best.node.choice is None)
            if child.state is not None and newest:
                best = Match(child, child.end)
            if count == block_size:
                nodes.append(child)
    return best


KV_LAYOUT_VERSION = 1  # of the arrays from `records`; a change orphans every stored record
DIGEST_BYTES = 24
_SAMPLES = 64  # elements of every parameter that enter the identity
_VOLATILE = ("_name_or_path", "transformers_version")  # no effect on the model's results
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def model_identity(model: nn.Module, config: Mapping[str, Any]) -> str:
    """Return the model's identity as hexadecimal text: equal for two loads of one checkpoint, from any path.

    Covers the configuration, every parameter's name, shape and dtype (so quantisation and casts), 64 evenly spaced
    elements of each, the layout of stored caches and mlx-lm's minor version. Weights that differ only between the
    samples have the same identity; training or merging changes whole matrices.

    Args:
        config: the contents of config.json.
    """
    parameters: list[tuple[str, mx.array]] = sorted(nn.utils.tree_flatten(model.parameters()))
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    settings = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(f"\0{KV_LAYOUT_VERSION}\0{'.'.join(version('mlx-lm').split('.')[:2])}\0".encode())
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name}{array.shape}{array.dtype}\0".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(array: mx.array) -> mx.array:
    """Return at most 64 elements, evenly spaced and with the last one, as unsigned integers of their size."""
    flat = array.reshape(-1)
    if flat.size > _SAMPLES:
        flat = flat[mx.array(np.linspace(0, flat.size - 1, _SAMPLES).astype(np.int64))]
    return flat.view(_BITS[flat.dtype.size]) if flat.size else flat.astype(mx.uint8)


def token_bytes(tokens: Sequence[int] | TokenIds) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(tokens, dtype="<i4").tobytes()


def root_digest(identity: str, block_size: int) -> bytes:
    """Return the parent digest of the first block: chains of two identities or two block sizes share no digest."""
    return hashlib.blake2b(f"{identity}\0{block_size}".encode(), digest_size=DIGEST_BYTES).digest()


def block_digest(
    parent: bytes, tokens: Sequence[int] | TokenIds, choice: str | None = None, positions: Tokens | None = None
) -> bytes:
    """Return the digest of a block after its parent's. The parent's length is fixed, so no two inputs are equal.

    Args:
        choice, positions: of a sparse one.
    """
    digest = hashlib.blake2b(parent + token_bytes(tokens), digest_size=DIGEST_BYTES).digest()
    if choice is None or positions is None:
        return digest
    chosen = choice.encode() + b"\0" + token_bytes(positions)
    return hashlib.blake2b(digest + chosen, digest_size=DIGEST_BYTES).digest()


def common_length(tokens: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    count = min(tokens.size, other.size)
    differing = np.flatnonzero(tokens[:count] != other[:count])
    return int(differing[0]) if differing.size else count
