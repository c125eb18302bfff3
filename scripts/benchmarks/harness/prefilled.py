"""Prompts whose prefill is over, and steps of so many rows that decode after it."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_specprefill.cache.positioned import leaves, make_positioned_cache, quantize_kv
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.sampling import greedy
from mlx_specprefill.shapes import Config, fewer_layers, find_shape, narrower, random_model
from mlx_specprefill.specprefill.sparse_prefill import prefill

from .alternating import median_interval
from .figures import Clock
from .stages import finish

__all__ = ["Prefilled", "Text", "compared_steps", "every_fifth_chunk", "prefilled", "random_target", "step_ms"]

CHUNK = 32  # tokens that are kept or dropped together
GROUP = 64  # values that share a scale, as in the engine
WARM = 3  # steps that are not timed: rows join in them, and shared arrays are copied
STEP = 512  # tokens per forward of a prefill

Text = Callable[[int, int], Sequence[int]]  # token ids by seed and number


@dataclass(frozen=True)
class Prefilled:
    """`shift`: positions minus slots, for caches that can't carry it."""

    cache: list[Any]
    logits: mx.array
    shift: int = 0

    def quantised(self, bits: int | None) -> Prefilled:
        if bits is None:
            return self
        cache, shift = quantize_kv(copy.deepcopy(self.cache), GROUP, bits)
        mx.eval([part.state for part in cache])
        return Prefilled(cache, self.logits, shift)

    @property
    def mib(self) -> float:
        """What the cache takes, with the room that it has grown."""
        return float(sum(part.nbytes for part in leaves(self.cache)) / 2**20)


def every_fifth_chunk(tokens: int) -> npt.NDArray[np.int32]:
    """A fifth of the prompt with the last token. Which chunks are kept does not change what decoding costs."""
    indices = np.arange(tokens, dtype=np.int32)
    chosen: npt.NDArray[np.int32] = indices[(indices // CHUNK % 5 == 0) | (indices == tokens - 1)]
    return chosen


def prefilled(model: nn.Module, prompt: Sequence[int], kept: npt.NDArray[np.int32] | None) -> Prefilled:
    """After a prefill of everything, or of the kept tokens at their positions."""
    cache = make_positioned_cache(model)
    return Prefilled(cache, finish(prefill(model, cache, prompt, kept, STEP)))


def step_ms(model: nn.Module, prompts: Sequence[Prefilled], rows: int, tokens: int) -> float:
    """Milliseconds per step of so many rows, which take the prompts in turn. The prompts' caches stay as they are."""
    batch = DecodeBatch(model)
    for uid in range(rows):
        one = prompts[uid % len(prompts)]
        batch.add(DecodeRow(uid, copy.deepcopy(one.cache), one.logits, greedy, shift=one.shift))
    for _ in range(WARM):
        batch.step()
    clock = Clock()
    for _ in range(tokens):
        batch.step()
    spent = clock.read()["ms"] / tokens
    mx.synchronize()  # the forward after the last token is queued already
    return spent


def compared_steps(
    model: nn.Module, arms: Mapping[str, Sequence[Prefilled]], base: str, rows: int, tokens: int, repeats: int
) -> dict[str, dict[str, float | None]]:
    """Of every arm, the median of its step's milliseconds, and how many times as fast as the base's it is.

    Arms take turns, in every second turn the other way round. `low` and `high` are the ends of the 95 % interval of the
    median; it takes six turns.
    """
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(repeats):
        for arm in sorted(arms, reverse=turn % 2 == 1):
            times[arm].append(step_ms(model, arms[arm], rows, tokens))
    found: dict[str, dict[str, float | None]] = {}
    for arm, spent in times.items():
        gains = [theirs / ours for theirs, ours in zip(times[base], spent, strict=True)]
        low, high = (None, None) if arm == base else median_interval(gains)
        figures = {"step_ms": statistics.median(spent), "gain": statistics.median(gains), "low": low, "high": high}
        found[arm] = figures
    return found


def random_target(name: str, layers: int, narrow: int) -> tuple[nn.Module, Text]:
    """A shape's target with random weights, and its prompts by seed and length."""
    config: Config = narrower(fewer_layers(find_shape(name).target, layers), narrow)
    mx.random.seed(0)
    model = random_model(config)
    mx.eval(model.parameters())
    words = int((config.get("text_config") or config)["vocab_size"])
    return model, lambda seed, length: np.random.default_rng(seed).integers(0, words, length).tolist()
