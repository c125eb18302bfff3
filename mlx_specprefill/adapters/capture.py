"""Query capture: the draft's attention rows, read where attention happens.

mlx-lm's attention modules differ in projections, norms, gates, rotations and cache layouts, but all of them hand
finished queries and keys to `mx.fast.scaled_dot_product_attention`, or their logits to `mx.softmax` where they write
attention by hand (gemma2, phi3small, quantised KV caches). Reading there needs no knowledge of the family: q_norm,
gate split, RoPE, per-token scales, MLA's float masks and sinks are already applied or passed along. The wrappers are
installed once and do nothing unless a capture is active on the calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..config import HeadRule

__all__ = ["AttentionRecord", "QueryCapture", "install_capture", "pool", "prompt_attention", "recorded_attention"]

_active = threading.local()
TILE = 1 << 20  # logits that are scored at a time; about a dozen arrays of that size exist meanwhile


def pool(rows: mx.array, width: int) -> mx.array:
    """Zero-padded mean over `width` (odd) neighbours along the last axis; padding counts, so the edges are attenuated.

    Args:
        rows: (..., M) float32.

    A window sum of any width is built from power-of-two window sums: log2(width) additions instead of width.
    """
    half, M = width // 2, rows.shape[-1]
    window = mx.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(half, half)])
    total, done, size = mx.zeros_like(rows), 0, 1
    while True:
        if width & size:
            total = total + window[..., done : done + M]
            done += size
        size *= 2
        if size > width:
            break
        window = window[..., : -(size // 2)] + window[..., size // 2 :]
    return total * (1.0 / width)


def prompt_attention(logits: mx.array, prompt_len: int, sinks: mx.array | None) -> mx.array:
    """Softmax over the prompt's keys in float32, (H, S) -> (H, M); a sink logit (H,) joins the denominator."""
    logits = logits[:, :prompt_len].astype(mx.float32)
    if sinks is None:
        return mx.softmax(logits, axis=-1)
    column = sinks.astype(mx.float32).reshape(-1, 1)
    return mx.softmax(mx.concatenate([logits, column], axis=-1), axis=-1)[:, :-1]


class QueryCapture:
    """Turns the attention of single-token forwards into pooled rows, the maximum or the mean over layers and heads.

    Only the running maximum or sum is kept, never the rows of all layers (both are associative).
    A layer counts when its key set spans the prompt and all tokens after it; what a rotating window or a gathered
    key set returns is shorter and is skipped.

    Attributes:
        prompt_len: M.
        rows: one (M,) float32 array per captured token, in order.
        layers: attention calls that counted, per row.
    """

    def __init__(self, prompt_len: int, pool_width: int, heads: HeadRule = "max") -> None:
        self.prompt_len = prompt_len
        self.pool_width = pool_width
        self.heads = heads
        self.rows: list[mx.array] = []
        self.layers: list[int] = []
        self._span = 0
        self._best: mx.array | None = None
        self._count = self._summed = 0

    @contextmanager
    def row(self, span: int) -> Iterator[None]:
        """Capture one single-token forward after which a full-length cache holds `span` tokens."""
        self._span, self._best, self._count, self._summed = span, None, 0, 0
        _active.capture = self
        try:
            yield
        finally:
            _active.capture = None
        if self._best is not None:
            self.rows.append(self._best if self.heads == "max" else self._best * (1.0 / self._summed))
            self.layers.append(self._count)

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        """One attention call: queries (1, H, 1, D), keys (1, H_kv, S, D)."""
        if queries.shape[0] != 1 or queries.shape[-2] != 1 or keys.shape[-2] != self._span:
            return
        heads, kv_heads, S = queries.shape[1], keys.shape[1], keys.shape[-2]
        if isinstance(mask, mx.array):
            mask = mx.broadcast_to(mask, (1, heads, 1, S)).reshape(kv_heads, -1, S)
        grouped = (queries * scale).reshape(kv_heads, heads // kv_heads, queries.shape[-1])
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
        for part in _tiles(kv_heads, heads // kv_heads, S):
            logits = self._after(grouped[part]) @ keys[0, part[0]].swapaxes(-1, -2)
            if isinstance(mask, mx.array):
                logits = mx.where(mask[part], logits, -mx.inf) if mask.dtype == mx.bool_ else logits + mask[part]
            self._add(logits.reshape(-1, S), None if sinks is None else sinks[part].reshape(-1))
        self._count += 1

    def observe_logits(self, logits: mx.array) -> None:
        """One hand-written softmax: (1, H, 1, S) or (1, H_kv, group, 1, S)."""
        if logits.ndim < 4 or logits.shape[0] != 1 or logits.shape[-2] != 1 or logits.shape[-1] != self._span:
            return
        rows = logits.reshape(1, -1, logits.shape[-1])
        for part in _tiles(1, rows.shape[1], rows.shape[2]):
            self._add(self._after(rows[part]).reshape(-1, rows.shape[2]), None)
        self._count += 1

    def _after(self, tile: mx.array) -> mx.array:
        """The tile, to be computed when the ones before it are done; else the graph advances all of them together."""
        if self._best is None:
            return tile
        ordered: list[mx.array] = mx.depends([tile], [self._best])
        return ordered[0]

    def _add(self, logits: mx.array, sinks: mx.array | None) -> None:
        rows = pool(prompt_attention(logits, self.prompt_len, sinks), self.pool_width)
        join, row = (mx.maximum, rows.max(axis=0)) if self.heads == "max" else (mx.add, rows.sum(axis=0))
        self._best = row if self._best is None else join(self._best, row)
        self._summed += rows.shape[0]


def _tiles(kv_heads: int, group: int, span: int) -> Iterator[tuple[slice, slice]]:
    """Parts of (H_kv, group) heads whose rows of `span` logits together are no more than a tile, or one row."""
    rows = max(1, TILE // span)
    for first in range(0, kv_heads, max(1, rows // group)):
        for member in range(0, group, rows):
            yield slice(first, first + max(1, rows // group)), slice(member, member + rows)


class AttentionRecord:
    """The queries of every attention call, in order, and the shape of the keys that they met.

    Attributes:
        queries: (1, H, L, D) each.
        keys: the shapes (1, H_kv, S, D) of the keys.
        handwritten: attention that no queries can be read from.
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
def recorded_attention() -> Iterator[AttentionRecord]:
    """Collects what attention is asked for on this thread."""
    record = AttentionRecord()
    _active.capture = record
    try:
        yield record
    finally:
        _active.capture = None


class _CapturingAttention:
    """`mx.fast.scaled_dot_product_attention` that shows its inputs to the active capture."""

    def __init__(self, attention: Callable[..., mx.array]) -> None:
        self.attention = attention

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        capture: QueryCapture | AttentionRecord | None = getattr(_active, "capture", None)
        if capture is not None:
            capture.observe(q, k, kwargs["scale"], kwargs.get("mask"), kwargs.get("sinks"))
        return self.attention(q, k, v, **kwargs)


class _CapturingSoftmax:
    """`mx.softmax` that shows attention logits to the active capture."""

    def __init__(self, softmax: Callable[..., mx.array]) -> None:
        self.softmax = softmax

    def __call__(self, a: mx.array, /, *args: Any, **kwargs: Any) -> mx.array:
        capture: QueryCapture | AttentionRecord | None = getattr(_active, "capture", None)
        if capture is not None:
            capture.observe_logits(a)
        return self.softmax(a, *args, **kwargs)


def install_capture() -> None:
    """Wrap both primitives, once per process."""
    if not isinstance(mx.fast.scaled_dot_product_attention, _CapturingAttention):
        mx.fast.scaled_dot_product_attention = _CapturingAttention(mx.fast.scaled_dot_product_attention)
    if not isinstance(mx.softmax, _CapturingSoftmax):
        mx.softmax = _CapturingSoftmax(mx.softmax)
