"""Turns logits into sampling distributions, with the request's filters, penalties and grammar.

Target and drafts of a request share one sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..constraints import GrammarState
from ..request import SamplingParams
from ..sampling import LogitsProcessor, choose, filtered_logits, make_sampler
from .verification import Distribution, Rng

__all__ = ["TokenSampler"]


class TokenSampler:
    """One request's sampling, with its own random number generator.

    Args:
        params: with temperature 0 every distribution is a single token.
        processors: functions of (generated tokens so far, logits (1, V)).
        grammar: the answer's grammar, at its start; `commit` advances it.
        stops: ids that end the answer.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        processors: Sequence[LogitsProcessor] = (),
        grammar: GrammarState | None = None,
        stops: frozenset[int] = frozenset(),
    ) -> None:
        self._filtered = None if params.temperature == 0 else filtered_logits(params, vocab_size)
        self._sampler = make_sampler(params, vocab_size)
        self._processors = processors
        self.grammar = grammar
        self._committed = 0
        self._size = vocab_size
        self.stops = stops
        self.rng = Rng(params.seed)

    def choose(self, logits: mx.array, before: Sequence[int]) -> mx.array:
        """Choose a token (1,) after the generated tokens `before`, without evaluating it. Ignores the grammar.

        Args:
            logits: (1, V).
        """
        history = mx.array(list(before), dtype=mx.int32) if self._processors else None
        return choose(logits, history, self._sampler, self._processors)[0]

    def distributions(self, logits: mx.array, before: Sequence[int], fed: Sequence[int] = ()) -> list[Distribution]:
        """Return the distribution of each row of logits (1 + F, V). Row i follows `before` and the first i of `fed`.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        rows = logits.astype(mx.float32)
        if self.grammar is not None:
            rows = mx.where(self._allowed(self.grammar, before, fed, rows.shape[-1]), rows, -mx.inf)
        if self._processors:
            rows = mx.concatenate([self._processed(rows[i : i + 1], [*before, *fed[:i]]) for i in range(len(rows))])
        if self._filtered is None:
            certain: list[Distribution] = np.array(mx.argmax(rows, axis=-1)).tolist()
            return certain
        weights = np.exp(np.array(self._filtered(rows), dtype=np.float64))
        return list(weights / weights.sum(axis=-1, keepdims=True))

    def permitted(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        """Return the number of leading `tokens` that the grammar permits after the generated tokens `before`.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        if self.grammar is None:
            return len(tokens)
        ahead = self._ahead(self.grammar, before)
        for count, token in enumerate(tokens):
            mask = ahead.allowed(max(self._size, token + 1))
            if mask is not None and not mask[token]:
                return count
            ahead.accept(token)
        return len(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        if self.grammar is not None:
            for token in tokens:
                self.grammar.accept(token)
            self._committed += len(tokens)

    def _allowed(self, grammar: GrammarState, before: Sequence[int], fed: Sequence[int], size: int) -> mx.array:
        """Return the grammar's mask of each row, (1 + F, V) bool."""
        ahead = self._ahead(grammar, before)
        masks = [ahead.allowed(size)]
        for token in fed:
            ahead.accept(token)
            masks.append(ahead.allowed(size))
        return mx.array(np.stack([np.ones(size, np.bool_) if mask is None else mask for mask in masks]))

    def _ahead(self, grammar: GrammarState, before: Sequence[int]) -> GrammarState:
        """Return a copy of the grammar advanced by these generated tokens."""
        ahead = grammar.fork()
        for token in before[self._committed :]:
            ahead.accept(token)
        return ahead

    def _processed(self, row: mx.array, text: Sequence[int]) -> mx.array:
        history, row = mx.array(list(text), dtype=mx.int32), mx.array(row)  # mlx-lm's processors write in place
        for process in self._processors:
            row = process(history, row)
        return row
