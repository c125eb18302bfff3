"""The truth about a verdict: the answer read again by mlx-lm alone, one token per forward, behind the whole prompt.

None of the code under test runs: mlx-lm's own caches, its own quantisation, and the argmax and filters of numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FullReading:
    """The log-probabilities (T, V) from which full reading would have chosen the tokens of an answer."""

    answer: tuple[int, ...]
    logprobs: Floats

    @property
    def own(self) -> list[int]:
        return [int(row.argmax()) for row in self.logprobs]

    @property
    def behind(self) -> list[float]:
        """Return by how much each token is less likely than the choice of full reading."""
        return [float(row.max() - row[token]) for row, token in zip(self.logprobs, self.answer, strict=True)]

    def reach(self, top_k: int) -> list[bool]:
        """Return whether each token is among the likeliest `top_k`."""
        rows = zip(self.logprobs, self.answer, strict=True)
        return [bool((row > row[token]).sum() < top_k) for row, token in rows]


def read_in_full(
    model: nn.Module, prompt: Sequence[int], answer: Sequence[int], kv_bits: int | None = None
) -> FullReading:
    cache = make_prompt_cache(model)
    model(mx.array(list(prompt))[None, :-1], cache=cache)
    mx.eval([part.state for part in cache])
    quantize = partial(maybe_quantize_kv_cache, cache, 0, 32, kv_bits)  # the demo models have heads of 32
    rows, fed = [], [prompt[-1], *answer[:-1]]
    for number, token in enumerate(fed):
        if number == 1:  # answers are quantised once their whole prompt is read
            quantize()
        logits = np.array(model(mx.array([[token]]), cache=cache)[0, -1].astype(mx.float32)).astype(np.float64)
        rows.append(logits - np.logaddexp.reduce(logits))
    return FullReading(tuple(answer), np.stack(rows))
