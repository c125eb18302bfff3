"""Rows for batches: prompts with and without gaps, prefilled one at a time, and what each of them answers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.positioned import Positioned, leaves, quantize_kv
from mlx_specprefill.choosing.sampling import logits_processors, make_sampler
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow, Removed
from mlx_specprefill.engine.prefixes.caches import empty_cache
from mlx_specprefill.events import TokenEvent
from mlx_specprefill.request import SamplingParams
from tests.support.autoregressive import decode
from tests.support.precision import assert_close
from tests.support.steps import finish, prefill

# Log-probabilities over quantised caches: float noise makes a value now and then round the other way, which moved them
# by 1e-3 and less where weights were off by 2e-7. A shift off by one, or a missing mask, moves them by .04 to .7.
ROUNDED = 5e-3


@dataclass(frozen=True)
class Row:
    """A prompt, the indices of it that are fed (None: all), and how its answer is chosen."""

    prompt: tuple[int, ...]
    kept: npt.NDArray[np.int32] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: int | None = None


def make_rows(vocab: int, count: int, seed: int = 0, sparse: bool = True) -> list[Row]:
    """Prompts from a few tokens to well beyond the tiny models' windows; every other one sparse, at different rates."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(rng.integers(5, 30) if index % 3 == 0 else rng.integers(40, 110))
        kept = None
        if sparse and index % 2:
            size = max(2, round(length * rng.uniform(0.2, 0.7)))
            kept = np.union1d(rng.choice(length - 1, size, replace=False), [length - 1]).astype(np.int32)
        rows.append(Row(tuple(rng.integers(2, vocab, length).tolist()), kept, logprobs=3))
    return rows


def prefilled(model: nn.Module, row: Row) -> tuple[list[Any], mx.array]:
    """Its cache, and the logits of its last prompt token."""
    cache = empty_cache(model)
    return cache, finish(prefill(model, cache, row.prompt, row.kept, 16))


def sampling_of(row: Row, vocab: int) -> dict[str, Any]:
    return {
        "sampler": make_sampler(row.sampling, vocab),
        "processors": logits_processors(row.sampling),
    }


def alone(model: nn.Module, row: Row, count: int) -> tuple[list[TokenEvent], list[Any]]:
    """The events of `count` tokens, and the cache that holds all but the last of them."""
    cache, logits = prefilled(model, row)
    events = decode(model, cache, logits, **sampling_of(row, logits.shape[-1]), max_tokens=count, logprobs=row.logprobs)
    return list(events), cache


def batch_row(model: nn.Module, uid: int, row: Row) -> DecodeRow:
    cache, logits = prefilled(model, row)
    return DecodeRow(uid, cache, logits, **sampling_of(row, logits.shape[-1]), logprobs=row.logprobs)


def quantised_row(model: nn.Module, uid: int, row: Row, bits: int) -> DecodeRow:
    """As an engine with quantised KV caches makes it after the prefill."""
    plain = batch_row(model, uid, row)
    cache, shift = quantize_kv(plain.cache, bits)
    return replace(plain, cache=cache, shift=shift)


def together(
    model: nn.Module,
    rows: Sequence[Row],
    joins: Sequence[int],
    counts: Sequence[int],
    batch: DecodeBatch | None = None,
    made: Callable[[nn.Module, int, Row], DecodeRow] = batch_row,
) -> tuple[Mapping[int, list[TokenEvent]], Mapping[int, Removed]]:
    """Row i joins at step joins[i] and leaves after counts[i] tokens."""
    batch = DecodeBatch(model) if batch is None else batch
    events: dict[int, list[TokenEvent]] = {uid: [] for uid in range(len(rows))}
    removed: dict[int, Removed] = {}
    step = 0
    while len(removed) < len(rows):
        for uid, row in enumerate(rows):
            if joins[uid] == step:
                batch.add(made(model, uid, row))
        for uid, event in batch.step():
            events[uid].append(event)
            if len(events[uid]) == counts[uid]:
                removed[uid] = batch.remove(uid)
        step += 1
    assert len(batch) == 0
    return events, removed


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def logprob_error(ours: Sequence[TokenEvent], theirs: Sequence[TokenEvent]) -> float:
    """Largest difference of reported log-probabilities, of the chosen tokens and of the best ones by rank."""

    def table(events: Sequence[TokenEvent]) -> npt.NDArray[np.float64]:
        return np.array([[event.logprob, *(best.logprob for best in event.top_logprobs)] for event in events])

    return float(np.abs(table(ours) - table(theirs)).max())


def contents(cache: Sequence[Any]) -> list[Any]:
    """Everything that a prompt cache holds, comparable whatever its storage looks like: arrays oldest first, and
    where the tokens lie."""
    held: list[Any] = []
    for leaf in leaves(cache):
        if hasattr(leaf, "held"):
            tokens = HeldTokens(leaf.held.runs())
            tokens.keep_last(getattr(leaf, "max_size", tokens.size))  # a ring that was fed several rows holds more
            held.append((leaf.next, leaf.slots, tokens.runs()))
            leaf = leaf.inner
        if hasattr(leaf, "cache"):
            held += [None if array is None else np.array(array.astype(mx.float32)) for array in leaf.cache]
        elif leaf.keys is None:
            held.append(None)
        elif hasattr(leaf, "_temporal_order"):
            size = min(leaf.offset, leaf.max_size)
            held += [
                np.array(leaf._temporal_order(a).astype(mx.float32))[..., -size:, :] for a in (leaf.keys, leaf.values)
            ]
        else:
            held += [np.array(array.astype(mx.float32)) for array in leaf.keys_and_values()]
    return held


def assert_same_contents(ours: Sequence[Any], theirs: Sequence[Any], atol: float = 1e-5) -> None:
    for mine, other in zip(contents(ours), contents(theirs), strict=True):
        if isinstance(other, np.ndarray):
            assert_close(mine, other, atol=atol, rtol=1e-4)
        else:
            assert mine == other


def shift_of(cache: Sequence[Any]) -> int:
    """Return next position minus next slot, in the first layer that has positions."""
    return next((part.shift for part in leaves(cache) if isinstance(part, Positioned)), 0)


def next_position(cache: Sequence[Any]) -> int:
    """Return the position of the next token; 0 for a cache of recurrent layers only."""
    return next((part.next for part in leaves(cache) if isinstance(part, Positioned)), 0)
