"""Makes verdicts: which tokens of a sparse answer full reading would write too, but for rounding.

In idle time the target reads the whole prompt, and the answer behind it, which the next turn needs anyway. The logits
of that forward say what full reading thinks of each token. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import mlx.core as mx
import numpy as np

from ...choosing.constraints import GrammarState, stack_masks
from ...choosing.sampling import LOGITS_ROWS, filtered_logits, processors_of
from ...events import Progress, PromptLogprobs
from ...request import GenerationRequest, concat_tokens
from ...verdict import Verdict
from .densify import densify
from .prefill import Prefiller

_EXPONENT = 0x7F800000  # bits of a float32

Guide = Callable[[GenerationRequest], GrammarState | None]
Quantize = Callable[[list[Any]], tuple[list[Any], int]]


def verify(
    prefiller: Prefiller,
    request: GenerationRequest,
    answer: tuple[int, ...],
    guide: Guide,
    quantize: Quantize,
) -> Generator[Progress | PromptLogprobs, None, Verdict]:
    """Make a sparse turn dense, and compare its answer. Yields between forwards.

    The exact cache then holds the prompt, and the answer unless the KV cache is quantised.

    Args:
        request: the answered one.
        answer: its tokens.
        guide: makes the request's grammar; `quantize`: `Rows.quantize`.
    """
    active, logits = yield from densify(prefiller, request)
    cache, _ = quantize(active.cache)
    comparison = _Comparison(request, guide(request), answer, prefiller.pair.vocab_size)
    comparison.read(logits)
    for start in range(0, len(answer), LOGITS_ROWS):
        part = answer[start : start + LOGITS_ROWS]
        rows = prefiller.pair.target(mx.array([part]), cache=cache)[0]
        comparison.read(rows)
        mx.eval([leaf.state for leaf in cache])
        yield Progress("prefill", start + len(part), len(answer))
    if cache is active.cache:
        prefiller.caches.keep_target(concat_tokens(request.prompt, answer), cache, request)
    return comparison.verdict()


class _Comparison:
    """Collects what the logits of one answer say."""

    def __init__(
        self, request: GenerationRequest, grammar: GrammarState | None, answer: tuple[int, ...], vocab_size: int
    ) -> None:
        sampling = request.sampling
        self._grammar = grammar
        self._processors = processors_of(request)
        self._filtered = filtered_logits(sampling, vocab_size) if sampling.temperature > 0 else None
        self._answer = mx.array(answer, dtype=mx.int32)
        self._done = 0
        self._parts: list[tuple[mx.array, ...]] = []

    def read(self, logits: mx.array) -> None:
        """Compare the next tokens with logits (R, V), those of the tokens before them."""
        tokens = self._answer[self._done : self._done + logits.shape[0]]
        if not tokens.size:
            return
        raw = logits[: tokens.size].astype(mx.float32)
        wanted, counted = self._process(raw), mx.ones(tokens.shape, mx.bool_)
        allowed = self._grammar_masks(tokens, raw.shape[-1])
        if allowed is not None:
            free, wanted = mx.argmax(wanted, axis=-1), self._process(mx.where(allowed, raw, -mx.inf))
            counted = mx.logical_and(free == mx.argmax(wanted, axis=-1), allowed.sum(axis=-1) > 1)
        agrees, tells = self._reaches(wanted, tokens, _rounding(raw, logits.dtype))
        self._parts.append((agrees, mx.logical_and(counted, tells)))
        mx.eval(self._parts[-1])
        self._done += tokens.size

    def _reaches(self, wanted: mx.array, tokens: mx.array, rounding: mx.array) -> tuple[mx.array, mx.array]:
        """Return for each token if it is the choice, or could be drawn, where logits may be off by `rounding` (R, 1);
        and if other tokens are not, or could not.
        """
        reached = _of(wanted, tokens)[:, None]
        if self._filtered is None:
            return (wanted <= reached + rounding).all(axis=-1), mx.ones(tokens.shape, mx.bool_)
        lowered = mx.where(wanted > reached, wanted - rounding, wanted)
        drawn = self._filtered(lowered) > -mx.inf
        return _of(drawn, tokens), drawn.sum(axis=-1) < (wanted > -mx.inf).sum(axis=-1)

    def verdict(self) -> Verdict:
        agrees, counted = (
            np.concatenate([np.array(part) for part in column]) for column in zip(*self._parts, strict=True)
        )
        return Verdict(agrees, counted)

    def _process(self, raw: mx.array) -> mx.array:
        """Apply the request's penalties and biases to each row, behind the tokens before it."""
        if not self._processors:
            return raw
        rows = []
        for i in range(raw.shape[0]):
            row = mx.array(raw[i : i + 1])  # processors write in place
            for process in self._processors:
                row = process(self._answer[: self._done + i], row)
            rows.append(row)
        return mx.concatenate(rows)

    def _grammar_masks(self, tokens: mx.array, size: int) -> mx.array | None:
        """Return the tokens that the grammar allowed at each place, (R, V) bool."""
        if self._grammar is None:
            return None
        masks = []
        for token in np.array(tokens).tolist():
            masks.append(self._grammar.mask(size))
            self._grammar.accept(token)
        return mx.array(stack_masks(masks, size))


def _rounding(logits: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return by how much a row's logits may differ between forwards of other sizes, (R, 1): two units in the last place
    of its largest one, in the type in which the model has written them.
    """
    largest = mx.where(mx.isfinite(logits), mx.abs(logits), 0).max(axis=-1, keepdims=True)
    power = mx.view(mx.view(largest, mx.int32) & _EXPONENT, mx.float32)  # of two, at most the largest
    return 2 * power * mx.finfo(dtype).eps


def _of(table: mx.array, tokens: mx.array) -> mx.array:
    """Return the entry of each row's token, (R,)."""
    return mx.take_along_axis(table, tokens[:, None], axis=-1)[:, 0]
