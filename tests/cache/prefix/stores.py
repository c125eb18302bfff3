"""Dense prefills, and caches filled without any model, for the tests of the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.cache.prefix.layout import nbytes_of
from mlx_specprefill.cache.prefix.tree import PrefixCache
from tests.support.precision import numbers

BLOCK = 8


def feed(model: nn.Module, cache: list[Any], tokens: Sequence[int], step: int = BLOCK) -> mx.array:
    """Feed tokens in chunks of `step`; the last one's logits (1, V)."""
    logits = mx.zeros((1, 1, 1))
    for start in range(0, len(tokens), step):
        logits = model(mx.array(list(tokens[start : start + step]))[None], cache=cache)
        mx.eval(logits, [part.state for part in cache])
    return logits[:, -1]


def decode(model: nn.Module, cache: list[Any], logits: mx.array, count: int) -> tuple[list[int], list[mx.array]]:
    """Greedy tokens and the logits each came from; the last token is not fed."""
    tokens: list[int] = []
    rows: list[mx.array] = []
    for _ in range(count):
        if tokens:
            logits = feed(model, cache, tokens[-1:])
        rows.append(logits)
        tokens.append(int(np.array(mx.argmax(logits))))
    return tokens, rows


def contents(cache: Sequence[Any], in_order: bool = False) -> list[Any]:
    """Return every layer's arrays as numpy arrays: valid tokens only, rings as they lie or oldest first."""
    held: list[Any] = []
    for part in leaves(cache):
        part = getattr(part, "inner", part)
        if isinstance(part, ArraysCache):
            held.append([None if array is None else numbers(array) for array in part.cache])
        elif in_order and isinstance(part, RotatingKVCache):
            held.append([numbers(part._temporal_order(array)) for array in (part.keys, part.values)] + [part.offset])
        elif not part.empty():
            held.append([numbers(array) for array in part.keys_and_values()] + [part.offset])
    return held


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Bit for bit."""
    a, b = tree_flatten(contents(ours)), tree_flatten(contents(theirs))
    return len(a) == len(b) and all(i == j and np.array_equal(x, y) for (i, x), (j, y) in zip(a, b, strict=True))


def fake_caches(
    stateful: bool = False, window: int | None = None, dtype: mx.Dtype = mx.float32, width: int = 4
) -> Callable[[], Any]:
    """Makes empty caches of a model that isn't there: two plain layers, and on demand a recurrent and a window one."""

    def make() -> list[Any]:
        more = [ArraysCache(2)] if stateful else []
        return [KVCache(), *more, KVCache(), *([RotatingKVCache(window)] if window else [])]

    make.dtype, make.width = dtype, width  # type: ignore[attr-defined]
    return make


def filled(make: Callable[[], Any], tokens: Sequence[int], chunk: int | None = None) -> list[Any]:
    """A cache whose content is a function of the tokens: key i says token i, a state hashes all of them."""
    cache: list[Any] = make()
    dtype, width = make.dtype, make.width  # type: ignore[attr-defined]
    ids = np.asarray(tokens, dtype=np.float32)
    step = chunk or max(len(ids), 1)
    for layer, part in enumerate(cache):
        if isinstance(part, ArraysCache):
            powers = np.power(0.5, np.arange(ids.size)[::-1] % 20)
            part.cache = [mx.full((1, 3, 4), float((ids * powers).sum())).astype(dtype), None]
            continue
        for start in range(0, ids.size, step):
            rows = mx.array(ids[start : start + step])[None, None, :, None] + layer * 0.25
            part.update_and_fetch(
                mx.broadcast_to(rows, (1, 2, rows.shape[2], width)).astype(dtype),
                mx.broadcast_to(-rows, (1, 2, rows.shape[2], 2)).astype(dtype),
            )
    mx.eval([part.state for part in cache])
    return cache


def held_bytes(cache: PrefixCache) -> int:
    """Return the bytes of the arrays in memory."""
    records = [record for node in cache._nodes() for record in node.records()]
    return sum(nbytes_of(record.arrays) for record in records if record.arrays is not None)


def prompt_of(seed: int) -> tuple[int, ...]:
    """One of a family of prompts of which some share their beginning."""
    rng = np.random.default_rng(seed)
    shared = range(1000 * (seed % 4), 1000 * (seed % 4) + 20)
    return (*shared, *(int(token) for token in rng.integers(5000, 9000, 4 + seed % 30)))
