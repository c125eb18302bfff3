"""From logits to the laws that tokens are drawn from: the request's own, after every filter, penalty and mask.

Target and drafts use the same one, so that a proposal is judged by what would have been drawn without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..request import SamplingParams
from ..sampling import LogitsProcessor, filtered_logits
from .verify import Law, RandomDice

__all__ = ["Chooser"]


class Chooser:
    """One request's rule for choosing tokens, with chance of its own.

    Args:
        params: temperature 0 makes every law a certain token.
        processors: functions of (generated tokens so far, logits (1, V)).
    """

    def __init__(self, params: SamplingParams, vocab_size: int, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._filtered = None if params.temperature == 0 else filtered_logits(params, vocab_size)
        self._processors = processors
        self.dice = RandomDice(params.seed)

    def laws(self, logits: mx.array, before: Sequence[int], fed: Sequence[int] = ()) -> list[Law]:
        """One law per row of logits (R, V). Row i follows the generated tokens `before` and the first i of `fed`."""
        rows = logits.astype(mx.float32)
        if self._processors:
            rows = mx.concatenate([self._processed(rows[i : i + 1], [*before, *fed[:i]]) for i in range(len(rows))])
        if self._filtered is None:
            certain: list[Law] = np.array(mx.argmax(rows, axis=-1)).tolist()
            return certain
        weights = np.exp(np.array(self._filtered(rows), dtype=np.float64))
        return list(weights / weights.sum(axis=-1, keepdims=True))

    def _processed(self, row: mx.array, text: Sequence[int]) -> mx.array:
        history, row = mx.array(list(text), dtype=mx.int32), mx.array(row)  # mlx-lm's processors write in place
        for process in self._processors:
            row = process(history, row)
        return row
