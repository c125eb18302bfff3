"""Captures attention at its primitive: the draft's rows for scorers, the target's queries for retrieval caches.

mlx-lm's attention modules differ in projections, norms, gates, rotations and cache layouts. All of them hand finished
queries and keys to `mx.fast.scaled_dot_product_attention`, or their logits to `mx.softmax` where they write attention
by hand (gemma2, phi3small, quantised KV caches). Reading there needs no knowledge of the family: q_norm, gate split,
RoPE, per-token scales, MLA's float masks and sinks are already applied or passed along. The wrappers
(`adapters/patches`) do nothing unless an observer is active on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .scoped import Active

TILE = 1 << 20  # logits that are scored at a time; about a dozen arrays of that size exist meanwhile
_observer: Active[QueryCapture | HeadCapture | AttentionRecord] = Active()


def pool(rows: mx.array, width: int) -> mx.array:
    """Return the zero-padded mean over `width` (odd) neighbours along the last axis. Padding counts: edges are
    attenuated.

    Args:
        rows: (..., M) float32.
    """
    half, M = width // 2, rows.shape[-1]
    padded = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(half, half)])
    total = sum((padded[..., shift : shift + M] for shift in range(width)), mx.zeros_like(rows))
    return total * (1.0 / width)


def prompt_attention(logits: mx.array, prompt_len: int, sinks: mx.array | None) -> mx.array:
    """Return the softmax over the prompt's keys in float32, (H, ..., S) -> (H, ..., M). Sinks (H,) join the
    denominator.
    """
    logits = logits[..., :prompt_len].astype(mx.float32)
    if sinks is None:
        return mx.softmax(logits, axis=-1)
    column = sinks.astype(mx.float32).reshape(-1, *[1] * (logits.ndim - 1))
    column = mx.broadcast_to(column, (*logits.shape[:-1], 1))
    return mx.softmax(mx.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]


class QueryCapture:
    """Turns the attention of single-token forwards into pooled rows, the maximum over layers and heads.

    Keeps only the running maximum, never the rows of all layers. A layer counts if its key set spans all tokens so far.
    The key set of a rotating window or a gathered one is shorter and is skipped.
    """

    def __init__(self, prompt_len: int, pool_width: int) -> None:
        self.prompt_len = prompt_len
        self.pool_width = pool_width
        self.rows: list[mx.array] = []
        self.layers: list[int] = []
        self._span = 0
        self._best: mx.array | None = None
        self._count = 0

    @contextmanager
    def row(self, span: int) -> Iterator[None]:
        """Capture one single-token forward after which a full-length cache holds `span` tokens."""
        self._span = span
        self._best, self._count = None, 0
        with _observer.during(self):
            yield
        if self._best is not None:
            self.rows.append(self._best)
            self.layers.append(self._count)

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        """Observe one attention call: queries (1, H, 1, D), keys (1, H_kv, S, D)."""
        if queries.shape[0] != 1 or queries.shape[-2] != 1 or keys.shape[-2] != self._span:
            return
        heads, kv_heads, S = queries.shape[1], keys.shape[1], keys.shape[-2]
        grouped = (queries * scale).reshape(kv_heads, heads // kv_heads, 1, queries.shape[-1])
        if isinstance(mask, mx.array):
            mask = mx.broadcast_to(mask, (1, heads, 1, S)).reshape(kv_heads, -1, 1, S)
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
        for part in self._tiles(kv_heads, heads // kv_heads, S):
            logits = self._after(grouped[part]) @ keys[0, part[0], None].swapaxes(-1, -2)
            if isinstance(mask, mx.array):
                logits = _apply_mask(logits, mask[part])
            self._add(logits.reshape(-1, *logits.shape[-2:]), None if sinks is None else sinks[part].reshape(-1))
        self._count += 1

    def observe_logits(self, logits: mx.array) -> None:
        """Observe one hand-written softmax: (1, H, 1, S) or (1, H_kv, group, 1, S), masked."""
        if logits.ndim < 4 or logits.shape[0] != 1 or logits.shape[-2:] != (1, self._span):
            return
        rows = logits.reshape(1, -1, *logits.shape[-2:])
        for part in self._tiles(1, rows.shape[1], self._span):
            self._add(self._after(rows[part])[0], None)
        self._count += 1

    def _tiles(self, kv_heads: int, group: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Yield parts of (H_kv, group) heads with `size` logits each. Each part fits a tile, or is one head."""
        fit = max(1, TILE // size)
        for first in range(0, kv_heads, max(1, fit // group)):
            for member in range(0, group, fit):
                yield slice(first, first + max(1, fit // group)), slice(member, member + fit)

    def _after(self, tile: mx.array) -> mx.array:
        """Return the tile, to be computed after the ones before it; else the graph advances all of them together."""
        if self._best is None:
            return tile
        ordered: list[mx.array] = mx.depends([tile], [self._best])
        return ordered[0]

    def _add(self, logits: mx.array, sinks: mx.array | None) -> None:
        """Add one layer's logits (H, 1, S)."""
        seen = prompt_attention(logits, self.prompt_len, sinks)[:, 0]
        pooled = pool(mx.pad(seen, [(0, 0), (0, self.prompt_len - seen.shape[-1])]), self.pool_width)
        row = pooled.max(axis=0)
        self._best = row if self._best is None else mx.maximum(self._best, row)


@dataclass(eq=False)
class HeadCapture:
    """Reads the attention rows of single heads while a part of the prompt is read.

    Attention calls are numbered in the order of a forward, from 0. Calls that can't be read are numbered too, so that a
    number means the same layer at every prompt length.

    Attributes:
        prompt_len: M.
        heads: the heads to read, by the number of their attention call; None: all heads of all calls.
        rank: of the process, if the heads of each call are split evenly over several in the order of their ranks. Only
            its own heads are found. Numbers count the heads of all ranks.
        attention: (M,) float32 per (call, head), the passage's mean attention; (P, M) if it was divided into P parts.
        calls: attention calls of the last captured forward.
    """

    prompt_len: int
    heads: Mapping[int, Sequence[int]] | None
    rank: int = 0
    attention: dict[tuple[int, int], mx.array] = field(default_factory=dict, init=False)
    calls: int = field(default=0, init=False)
    _span: int = field(default=0, init=False)
    _length: int = field(default=0, init=False)
    _passage: slice = field(default_factory=lambda: slice(0, 0), init=False)
    _parts: mx.array | None = field(default=None, init=False)

    @contextmanager
    def of_passage(self, span: int, length: int, passage: slice, parts: mx.array | None = None) -> Iterator[None]:
        """Capture the passage in a causal forward of `length` tokens, after which the cache holds `span` <= M.

        Args:
            parts: weight of each token of the passage in each of its parts, (P, tokens); None: the mean of all.
        """
        self._span, self._length, self._passage, self._parts = span, length, passage, parts
        self.calls = 0
        with _observer.during(self):
            yield

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        """Observe one attention call: queries (1, H, L, D), keys (1, H_kv, S, D)."""
        call, S = self._next_call(), keys.shape[-2]
        if queries.shape[0] != 1 or queries.shape[-2] != self._length or self._span != S:
            return
        group = queries.shape[1] // keys.shape[1]
        seen = self._mask_of(mask, queries.shape[1])
        for number, head in self._wanted_heads(call, queries.shape[1]):
            rows = queries[0, head, self._passage] * scale
            logits = _apply_mask(rows @ keys[0, head // group].T, seen[min(head, seen.shape[0] - 1)])
            self._keep(call, number, logits, None if sinks is None else sinks[head : head + 1])

    def observe_logits(self, logits: mx.array) -> None:
        """Observe one hand-written softmax: (1, H, L, S) or (1, H_kv, group, L, S), masked."""
        if logits.ndim < 4 or logits.shape[0] != 1 or logits.shape[-2] != self._length:
            return  # a router's softmax
        call = self._next_call()
        if logits.shape[-1] != self._span:
            return
        rows = logits.reshape(-1, *logits.shape[-2:])
        for number, head in self._wanted_heads(call, rows.shape[0]):
            self._keep(call, number, rows[head, self._passage], None)

    def _next_call(self) -> int:
        self.calls += 1
        return self.calls - 1

    def _wanted_heads(self, call: int, heads: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of wanted heads, with their places among the `heads` of this rank."""
        first = self.rank * heads
        here = range(first, first + heads)
        for number in here if self.heads is None else self.heads.get(call, ()):
            if number in here:
                yield number, number - first

    def _mask_of(self, mask: Any, heads: int) -> mx.array:
        """Return the mask of the passage's rows, (1 or H, rows, S), boolean or added to the logits."""
        if isinstance(mask, mx.array):
            rows = mx.broadcast_to(mask, (1, mask.shape[1] if mask.ndim == 4 else 1, self._length, self._span))
            return rows[0, :, self._passage]
        indices = mx.arange(self._span)
        seen: mx.array = indices[-self._length :][self._passage][:, None] >= indices
        return seen[None]

    def _keep(self, call: int, head: int, logits: mx.array, sinks: mx.array | None) -> None:
        """Keep one head's mean attention from logits (rows, S)."""
        rows = prompt_attention(logits[None], self.prompt_len, sinks)[0]
        row = rows.mean(axis=0) if self._parts is None else self._parts @ rows
        self.attention[call, head] = mx.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, self.prompt_len - row.shape[-1])])


def _apply_mask(logits: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, logits, -mx.inf) if mask.dtype == mx.bool_ else logits + mask


class AttentionRecord:
    """The queries of every attention call, in order, and the shapes of their keys.

    Attributes:
        queries: (1, H, L, D) each.
        keys: the shapes (1, H_kv, S, D) of the keys.
        handwritten: number of attention calls without readable queries.
    """

    def __init__(self) -> None:
        self.queries: list[mx.array] = []
        self.keys: list[tuple[int, ...]] = []
        self.handwritten = False

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        self.queries.append(queries)
        self.keys.append(tuple(keys.shape))

    def observe_logits(self, logits: mx.array) -> None:
        self.handwritten = self.handwritten or logits.ndim >= 4


@contextmanager
def record_attention() -> Iterator[AttentionRecord]:
    """Collect the attention calls on this thread."""
    record = AttentionRecord()
    with _observer.during(record):
        yield record


def wrap_attention(attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `mx.fast.scaled_dot_product_attention` to show its inputs to the active observer."""

    def attend(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        if _observer.value is not None:
            _observer.value.observe(q, k, kwargs["scale"], kwargs.get("mask"), kwargs.get("sinks"))
        return attention(q, k, v, **kwargs)

    return attend


def wrap_softmax(softmax: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap `mx.softmax` to show attention logits to the active observer."""

    def normalise(a: mx.array, /, *args: Any, **kwargs: Any) -> mx.array:
        if _observer.value is not None:
            _observer.value.observe_logits(a)
        return softmax(a, *args, **kwargs)

    return normalise
