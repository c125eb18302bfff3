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
PASSAGE_TILE = TILE // 4  # beside the activations of a longer forward


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
    """Softmax over the prompt's keys in float32, (H, ..., S) -> (H, ..., M); a sink (H,) joins the denominator."""
    logits = logits[..., :prompt_len].astype(mx.float32)
    if sinks is None:
        return mx.softmax(logits, axis=-1)
    column = sinks.astype(mx.float32).reshape(-1, *[1] * (logits.ndim - 1))
    column = mx.broadcast_to(column, (*logits.shape[:-1], 1))
    return mx.softmax(mx.concatenate([logits, column], axis=-1), axis=-1)[..., :-1]


class QueryCapture:
    """Turns the attention of forwards into pooled rows, the maximum or the mean over layers and heads.

    Only the running maximum or sum is kept, never the rows of all layers (both are associative).
    A layer counts when its key set spans all tokens so far; what a rotating window or a gathered key set returns is
    shorter and is skipped.

    Attributes:
        prompt_len: M.
        counted: bool (M,), the tokens whose attention is pooled; None: all.
        rows: one (M,) float32 array per captured token, in order.
        layers: attention calls that counted, per row.
        passage: (M,) float32, what the tokens of a passage attend to on average; None before that.
    """

    def __init__(
        self, prompt_len: int, pool_width: int, heads: HeadRule = "max", counted: mx.array | None = None
    ) -> None:
        self.prompt_len = prompt_len
        self.pool_width = pool_width
        self.heads = heads
        self.counted = counted
        self.rows: list[mx.array] = []
        self.layers: list[int] = []
        self.passage: mx.array | None = None
        self._span, self._length, self._picked = 0, 1, slice(0, 1)
        self._best: mx.array | None = None
        self._count = self._summed = 0
        self._mask: mx.array | None = None
        self._whole = True

    @contextmanager
    def row(self, span: int) -> Iterator[None]:
        """Capture one single-token forward after which a full-length cache holds `span` tokens."""
        with self._observing(span, 1, slice(0, 1)):
            yield
        if (row := self._joined()) is not None:
            self.rows.append(row)
            self.layers.append(self._count)

    @contextmanager
    def of_passage(self, span: int, length: int, passage: slice) -> Iterator[None]:
        """Capture these tokens of a causal forward of `length` tokens after which the cache holds `span` tokens."""
        with self._observing(span, length, passage):
            yield
        self.passage = self._joined()

    @contextmanager
    def _observing(self, span: int, length: int, picked: slice) -> Iterator[None]:
        self._span, self._length, self._picked = span, length, picked
        self._best, self._count, self._summed = None, 0, 0
        _active.capture = self
        try:
            yield
        finally:
            _active.capture = self._mask = None

    def _joined(self) -> mx.array | None:
        if self._best is None or self.heads == "max":
            return self._best
        return self._best * (1.0 / self._summed)

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        """One attention call: queries (1, H, L, D), keys (1, H_kv, S, D)."""
        if queries.shape[0] != 1 or queries.shape[-2] != self._length or keys.shape[-2] != self._span:
            return
        heads, kv_heads, S = queries.shape[1], keys.shape[1], keys.shape[-2]
        if self._length > 1 and not self._sees_all(mask):
            return
        grouped = (queries[:, :, self._picked] * scale).reshape(kv_heads, heads // kv_heads, -1, queries.shape[-1])
        mask = self._mask_of(mask, heads)
        mask = None if mask is None else mask.reshape(kv_heads, -1, *mask.shape[-2:])
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
        for part in self._tiles(kv_heads, heads // kv_heads, S * grouped.shape[2]):
            logits = self._after(grouped[part]) @ keys[0, part[0], None].swapaxes(-1, -2)
            if mask is not None:
                logits = mx.where(mask[part], logits, -mx.inf) if mask.dtype == mx.bool_ else logits + mask[part]
            self._add(logits.reshape(-1, *logits.shape[-2:]), None if sinks is None else sinks[part].reshape(-1))
        self._count += 1

    def _sees_all(self, mask: Any) -> bool:
        """Whether the last captured row sees all before it: a window hands over all keys if they came at once."""
        if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
            return True
        if self._mask is not mask:  # the layers of a kind share one
            last = self._picked.stop - 1
            row = mask.reshape(-1, *mask.shape[-2:])[:, last, : self._span - self._length + last + 1]
            self._mask, self._whole = mask, bool(row.all().item())
        return self._whole

    def _mask_of(self, mask: Any, heads: int) -> mx.array | None:
        """Of the captured rows, (H, rows, S); None if they may see everything."""
        if isinstance(mask, mx.array):
            return mx.broadcast_to(mask, (1, heads, self._length, self._span))[0, :, self._picked]
        if self._length == 1:
            return None
        indices = mx.arange(self._span)
        seen: mx.array = indices[-self._length :][self._picked][:, None] >= indices
        return mx.broadcast_to(seen, (heads, *seen.shape))

    def observe_logits(self, logits: mx.array) -> None:
        """One hand-written softmax: (1, H, L, S) or (1, H_kv, group, L, S), masked."""
        if logits.ndim < 4 or logits.shape[0] != 1 or logits.shape[-2:] != (self._length, self._span):
            return
        rows = logits[..., self._picked, :]
        rows = rows.reshape(1, -1, *rows.shape[-2:])
        for part in self._tiles(1, rows.shape[1], rows.shape[2] * rows.shape[3]):
            self._add(self._after(rows[part])[0], None)
        self._count += 1

    def _tiles(self, kv_heads: int, group: int, size: int) -> Iterator[tuple[slice, slice]]:
        """Parts of (H_kv, group) heads of `size` logits each that together are no more than a tile, or one head."""
        fit = max(1, (TILE if self._length == 1 else PASSAGE_TILE) // size)
        for first in range(0, kv_heads, max(1, fit // group)):
            for member in range(0, group, fit):
                yield slice(first, first + max(1, fit // group)), slice(member, member + fit)

    def _after(self, tile: mx.array) -> mx.array:
        """The tile, to be computed when the ones before it are done; else the graph advances all of them together."""
        if self._best is None:
            return tile
        ordered: list[mx.array] = mx.depends([tile], [self._best])
        return ordered[0]

    def _add(self, logits: mx.array, sinks: mx.array | None) -> None:
        """Logits (H, rows, S): the mean over the rows of a passage comes before heads are compared."""
        seen = prompt_attention(logits, self.prompt_len, sinks).mean(axis=1)
        seen = mx.pad(seen, [(0, 0), (0, self.prompt_len - seen.shape[-1])])
        if self.counted is not None:
            seen = seen * self.counted
        pooled = pool(seen, self.pool_width)
        join, row = (mx.maximum, pooled.max(axis=0)) if self.heads == "max" else (mx.add, pooled.sum(axis=0))
        self._best = row if self._best is None else join(self._best, row)
        self._summed += pooled.shape[0]


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
