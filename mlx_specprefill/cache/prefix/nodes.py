"""The tree of token blocks: its nodes, the arrays and digests in them, and the search for a prompt.

A full block hangs below the block before it, a shorter tail below the last full block. Each holds the keys and values
of its own tokens only, so prompts share common blocks. A sparse prefill leaves out tokens, and may read earlier ones
later. A sparse block lists the tokens that it holds, and is found only by requests with the same selection rule.

A block stores the arrays of its layers. Full attention stores token by token, so any range of tokens can be cut out and
any prefix rebuilt. Recurrent layers and rotating windows hold only their latest state, which is valid at exactly one
length.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from ...request import SHARED, CacheLabel, TokenIds
from ..budget import Evictable
from ..positioned import Positioned, PositionedKVCache, PositionedRotatingKVCache, Runs, leaves

CacheKind = Literal["target", "draft", "session"]


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
        held: prompt indices in a sparse cache, int32, in the order of feeding; None: it holds all.
        hidden: parts of a staged one, each (index of the first token, hidden states (1, L, D)).
        is_whole: no stored prefix goes on from it.
    """

    length: int
    cache: list[Any]
    held: TokenIds | None = None
    hidden: list[tuple[int, mx.array]] = field(default_factory=list)
    is_whole: bool = False


Arrays = dict[str, mx.array]
_Kind = Literal["tokens", "window", "recurrent"]


def nbytes_of(arrays: Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _kind(leaf: Any) -> _Kind | None:
    if type(leaf) in (KVCache, PositionedKVCache):
        return "tokens"
    if type(leaf) in (RotatingKVCache, PositionedRotatingKVCache):
        return "window"
    return "recurrent" if isinstance(leaf, ArraysCache) else None


class Layout:
    """Splits one model's prompt cache into arrays. Array names are `<leaf>.<part>`.

    Attributes:
        refusal: why this model's caches can't be stored exactly; None if they can.
        stateful: some layer can't be trimmed, so a prefix is usable only at a stored state.
        lacks_dense: what is staged can't serve a dense request, even before its first gap: the first layers' state is
            left out, or no other layer shows where the gaps are.
    """

    def __init__(self, make_cache: Callable[[], list[Any]], first_layers: int = 0) -> None:
        """Args:
        first_layers: leaves in front that are left out of what is staged.
        """
        self._make = make_cache
        self._first = first_layers
        parts = list(leaves(make_cache()))
        self._kinds = [_kind(part) for part in parts]
        unknown = sorted({type(part).__name__ for part in parts if _kind(part) is None})
        self.refusal = f"cache type {', '.join(unknown)} can't be stored" if unknown else None
        self.stateful = any(kind != "tokens" for kind in self._kinds)
        first, others = self._kinds[:first_layers], self._kinds[first_layers:]
        self.lacks_dense = any(kind != "tokens" for kind in first) or "tokens" not in others

    def check(self, cache: Sequence[Any], length: int, more: bool = False) -> None:
        """Check that a cache holds `length` tokens densely. Recurrent layers are not checked.

        Args:
            more: accept more tokens.

        Raises:
            ValueError: another number of tokens, gaps between positions, several rows, or another model's cache.
        """
        parts = list(leaves(cache))
        if [_kind(part) for part in parts] != self._kinds:
            raise ValueError("the cache is not of this model")
        counted = False
        for part, kind in zip(parts, self._kinds, strict=True):
            if part.empty():  # some models make caches that no layer uses
                continue
            if kind != "recurrent":
                _check_counts(part, length, more)
            counted = counted or kind != "recurrent" or set(self._kinds) == {"recurrent"}
        if length and not counted:
            raise ValueError(f"the cache is empty and can't hold {length} tokens")

    def delta(self, cache: Sequence[Any], start: int, end: int, staged: bool = False) -> Arrays:
        """Copy the keys and values in slots [start, end), (1, H, end - start, D) each. The result is not evaluated."""
        arrays: Arrays = {}
        for index, part in self._layers_of(cache, "tokens", staged):
            # A plain slice would be a view that keeps the whole cache alive.
            arrays[f"{index}.keys"] = mx.contiguous(part.keys[..., start:end, :])
            arrays[f"{index}.values"] = mx.contiguous(part.values[..., start:end, :])
        return arrays

    def state(self, cache: Sequence[Any], staged: bool = False) -> Arrays:
        """Copy the state of layers that can't be trimmed. The result is not evaluated."""
        arrays: Arrays = {}
        for index, part in self._layers_of(cache, "recurrent", staged):
            for slot, array in enumerate(part.cache):
                if array is not None:
                    arrays[f"{index}.{slot}"] = mx.contiguous(array)
        for index, part in self._layers_of(cache, "window", staged):
            ring = part.inner if isinstance(part, Positioned) else part
            keys, values, write = _compact(ring)
            arrays[f"{index}.keys"], arrays[f"{index}.values"] = mx.contiguous(keys), mx.contiguous(values)
            arrays[f"{index}.write"] = mx.array([write], dtype=mx.int32)
            if isinstance(part, Positioned) and part.shift:
                held = part.runs.expand()[-keys.shape[2] :]
                arrays[f"{index}.positions"] = mx.array(held)
                arrays[f"{index}.slots"] = mx.array([part.slots], dtype=mx.int32)
        return arrays

    def build(
        self,
        chain: Sequence[Arrays],
        excess: int,
        state: Arrays | None,
        length: int,
        room: int = 0,
        held: TokenIds | None = None,
    ) -> list[Any]:
        """Return a prompt cache for `length` tokens that shares nothing writable with its source arrays.

        Keys and values are not evaluated: the first forward copies them, layer by layer, to its own arrays. A cache
        that no forward reads costs no copy.

        Args:
            chain: deltas from the first token on; the last one may hold more tokens.
            excess: number of tokens to cut from the end.
            state: of the other layers at exactly `length`; None if there are none.
            room: tokens that can be written without another copy.
            held: positions of the tokens, in the order of feeding; None: all `length`.
        """
        cache = self._make()
        for index, (part, kind) in enumerate(zip(leaves(cache), self._kinds, strict=True)):
            if kind == "tokens":
                _restore_tokens(part, index, chain, excess, length, room, held)
            elif state is not None and kind == "recurrent":
                _restore_recurrent(part, index, state)
            elif state is not None and f"{index}.keys" in state:
                _restore_window(part, index, state, length)
        return cache

    def _layers_of(self, cache: Sequence[Any], kind: _Kind, staged: bool) -> list[tuple[int, Any]]:
        parts = zip(leaves(cache), self._kinds, strict=True)
        first = self._first if staged else 0
        wanted = [(i, part) for i, (part, its) in enumerate(parts) if its == kind and i >= first]
        return [(i, part) for i, part in wanted if kind == "recurrent" or not part.empty()]


def _check_counts(part: Any, length: int, more: bool) -> None:
    if isinstance(part, Positioned):
        placed = not isinstance(part.offset, int)
        if placed or part.shift != 0 or not part.runs.contiguous:
            raise ValueError(f"a sparse cache (next position {part.next}, {part.slots} tokens) is no dense prefix")
        part = part.inner
    if part.offset < length or (part.offset > length and not more):
        raise ValueError(f"the cache holds {part.offset} tokens, not {length}")
    if part.keys.shape[0] != 1:
        raise ValueError(f"the cache holds {part.keys.shape[0]} rows, not one")


def _compact(ring: Any) -> tuple[mx.array, mx.array, int]:
    """Return keys, values and write slot of a ring without unused or expired slots, in storage order.

    After a chunk the ring is longer than its window; the cut is that of its next write. The order is kept: a sum over
    keys in another order rounds differently.
    """
    size = min(ring.offset, ring.keys.shape[2])
    start, write = 0, ring._idx
    if size > ring.max_size and ring.keep == 0:
        start, write = size - ring.max_size, ring.max_size
    return ring.keys[..., start:size, :], ring.values[..., start:size, :], write


def _restore_tokens(
    part: Any,
    index: int,
    chain: Sequence[Arrays],
    excess: int,
    length: int,
    room: int,
    held: TokenIds | None,
) -> None:
    names = f"{index}.keys", f"{index}.values"
    if not chain or not all(names[0] in arrays for arrays in chain):  # staged: no first layers
        return
    slots = length if held is None else held.size
    spare = -(slots + room) % KVCache.step + room if room else 0
    keys, values = (_join([arrays[name] for arrays in chain], excess, spare) for name in names)
    inner = keys, values, slots
    if not isinstance(part, Positioned):
        part.state = inner
        return
    part.state = inner, length, [(0, length)] if held is None else _runs_of(held)


def _runs_of(positions: TokenIds) -> list[tuple[int, int]]:
    runs = Runs()
    runs.extend(positions)
    return runs.pairs()


def _join(parts: list[mx.array], excess: int, spare: int) -> mx.array:
    """Concatenate parts (1, H, S, D) without the last `excess` tokens, and with `spare` slots behind them. Not
    evaluated.
    """
    last = parts[-1]
    if excess:
        parts[-1] = last[..., : last.shape[2] - excess, :]
    if spare:
        parts.append(mx.zeros((1, last.shape[1], spare, last.shape[3]), last.dtype))
    return mx.concatenate(parts, axis=2)


def _restore_recurrent(part: Any, index: int, state: Arrays) -> None:
    for slot in range(len(part.cache)):
        stored = state.get(f"{index}.{slot}")
        # In-place assignment would change the array object for every holder.
        part.cache[slot] = None if stored is None else copy.deepcopy(stored)


def _restore_window(part: Any, index: int, state: Arrays, length: int) -> None:
    keys, values = (copy.deepcopy(state[f"{index}.{name}"]) for name in ("keys", "values"))
    ring = part.inner if isinstance(part, Positioned) else part
    sparse = f"{index}.positions" in state
    slots = int(state[f"{index}.slots"]) if sparse else length
    inner = keys, values, slots, ring.keep, ring.max_size, int(state[f"{index}.write"])
    if not isinstance(part, Positioned):
        part.state = inner
        return
    held = min(length, ring.max_size)
    runs = _runs_of(np.array(state[f"{index}.positions"])) if sparse else [(length - held, held)]
    part.state = inner, length, runs


Tokens = npt.NDArray[np.int32]
RecordKind = Literal["tokens", "state"]
ANY_SELECTION = ""  # every selection key begins with it


class Fed:
    """Tokens of a prompt that a cache has read.

    Attributes:
        positions: their prompt indices in the order of feeding, int32 (N,). One that is smaller than an earlier one was
            recalled, for the sake of the next one that is not.
        dense_tokens: tokens before the first gap.
    """

    def __init__(self, positions: Tokens) -> None:
        self.positions = positions
        highest = np.maximum.accumulate(positions)
        self._slots = np.flatnonzero(np.append(-1, highest[:-1]) < positions)  # of the tokens that were not recalled
        self._ends = positions[self._slots]
        gaps = np.flatnonzero(positions != np.arange(positions.size))
        self.dense_tokens = int(gaps[0]) if gaps.size else positions.size

    def slots(self, length: int) -> int:
        """Return the number of tokens fed when the cache covered the prompt's first `length` tokens."""
        count = int(np.searchsorted(self._ends, length))
        return int(self._slots[count - 1]) + 1 if count else 0

    def within(self, start: int, end: int) -> Tokens | None:
        """Return the positions of a block [start, end); None if the prefix up to its end is dense."""
        return None if end <= self.dense_tokens else self.positions[self.slots(start) : self.slots(end)]


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
        selection_key: names the selection rule; None: it is dense.
        positions: of a sparse block, as in `Fed`.
    """

    def __init__(
        self,
        parent: Node | None,
        tokens: Tokens,
        digest: bytes,
        label: CacheLabel,
        selection_key: str | None = None,
        positions: Tokens | None = None,
    ) -> None:
        self.parent = parent
        self.label = label
        self.selection_key = selection_key
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

    @property
    def seen_at(self) -> float:
        """Return when it was last used, in seconds since the epoch."""
        return 0.0 if self.record is None else self.record.seen_at

    def common(self, wanted: Tokens, selection_key: str | None = None) -> list[tuple[int, Node]]:
        """Return the children that share tokens with `wanted` after this node, with the number of shared tokens.

        Args:
            selection_key: beginning of the keys of sparse children to include; None: none.
        """
        rest = wanted[self.end :]
        first = int(rest[0]) if rest.size else None
        return [
            (common_length(child.tokens, rest), child)
            for child in self.children.values()
            if child.first == first
            and (
                child.selection_key is None
                or (selection_key is not None and child.selection_key.startswith(selection_key))
            )
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
    """The node that `wanted` reaches, and the number of tokens that match.

    Attributes:
        fed: what the blocks up to the node hold; None: the match is dense, or not looked at yet.
    """

    node: Node
    length: int
    fed: Fed | None = None


def longest_match(root: Node, wanted: Tokens, selection_key: str | None = None) -> Match | None:
    """Follow the prompt as far as possible, into the middle of a block if necessary. Prefers a dense match of equal
    length.
    """
    return _best(_matches(root, wanted, selection_key))


def deepest_state(root: Node, wanted: Tokens, selection_key: str | None = None) -> Match | None:
    """Return the longest prefix that ends in a stored state. Prefers a dense one of equal length."""
    found = _matches(root, wanted, selection_key)
    return _best(match for match in found if match.node.state is not None and match.length == match.node.end)


def _best(matches: Iterable[Match]) -> Match | None:
    return max(matches, key=lambda match: (match.length, match.node.selection_key is None), default=None)


def _matches(root: Node, wanted: Tokens, selection_key: str | None) -> Iterator[Match]:
    """Yield all nodes that share tokens with the prompt, and all tokens before them."""
    nodes = [root]
    while nodes:
        for count, child in nodes.pop().common(wanted, selection_key):
            yield Match(child, child.end - child.tokens.size + count)
            if count == child.tokens.size:
                nodes.append(child)


def others_ends(root: Node, wanted: Tokens, most: int) -> tuple[int, list[Node]]:
    """Return the length that the prompt shares with any stored prefix, and the ends of the prefixes that share it and
    go on otherwise: the `most` recently used ones, the latest first.
    """
    matches = list(_matches(root, wanted, ANY_SELECTION)) or [Match(root, 0)]
    shared = max(match.length for match in matches)
    longest = (node for match in matches if match.length == shared for node in match.node.subtree())
    ends = [node for node in longest if node.end > shared and not node.children]
    return shared, sorted(ends, key=lambda node: node.seen_at, reverse=True)[:most]


KV_LAYOUT_VERSION = 1  # of the arrays from `records`; a change orphans every stored record
DIGEST_BYTES = 24
LABEL_MARK = "@"  # between an identity and a label, neither of which contains it
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


def labelled(name: str, label: CacheLabel) -> str:
    """Return a model's name with the label, which is unique per label."""
    return name if label == SHARED else f"{name}{LABEL_MARK}{label.owner}/{label.salt}"


def label_of(name: str) -> CacheLabel:
    """Return the label in a name from `labelled`."""
    owner, _, salt = name.partition(LABEL_MARK)[2].partition("/")
    return CacheLabel(owner, salt)


def make_root(identity: str, block_size: int, label: CacheLabel) -> Node:
    """Return an empty tree of one model for a label. Trees of another identity or block size share no digest."""
    name = f"{labelled(identity, label)}\0{block_size}"
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).digest()
    return Node(None, np.zeros(0, dtype=np.int32), digest, label)


def block_digest(
    parent: bytes, tokens: Sequence[int] | TokenIds, selection_key: str | None = None, positions: Tokens | None = None
) -> bytes:
    """Return the digest of a block after its parent's. The parent's length is fixed, so no two inputs are equal.

    Args:
        selection_key, positions: of a sparse one.
    """
    digest = hashlib.blake2b(parent + token_bytes(tokens), digest_size=DIGEST_BYTES).digest()
    if selection_key is None or positions is None:
        return digest
    chosen = selection_key.encode() + b"\0" + token_bytes(positions)
    return hashlib.blake2b(digest + chosen, digest_size=DIGEST_BYTES).digest()


def common_length(tokens: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return the length of the common prefix."""
    count = min(tokens.size, other.size)
    differing = np.flatnonzero(tokens[:count] != other[:count])
    return int(differing[0]) if differing.size else count
