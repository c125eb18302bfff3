"""Speculative sampling: verifies proposed tokens, and draws the next one (TriForce, section 4.2).

The text keeps the target's distribution. One function serves both levels of a hierarchy. A distribution is a vector of
probabilities, or, at temperature 0, a single token. Target and drafts of a request share one sampler, which applies the
request's filters, penalties and grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..choosing.constraints import GrammarState, stack_masks
from ..choosing.sampling import LogitsProcessor, choose, filtered_logits, make_sampler
from ..request import SamplingParams

Probabilities = npt.NDArray[np.float64]
# Probabilities (V,), or the only possible token.
Distribution = Probabilities | int


class Rng:
    """Pseudo-random choices from a seed."""

    def __init__(self, seed: int | None) -> None:
        self._random = np.random.default_rng(seed)

    def bernoulli(self, probability: float) -> bool:
        """Return True with this probability."""
        return float(self._random.random()) < probability

    def categorical(self, distribution: Probabilities) -> int:
        """Draw a token from the distribution (V,)."""
        sums = np.cumsum(distribution)
        drawn = int(np.searchsorted(sums, self._random.random() * sums[-1], side="right"))
        return min(drawn, int(np.flatnonzero(distribution)[-1]))  # the product may round up to the last sum


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` proposed tokens are kept; `token` follows them."""

    accepted: int
    token: int


def verify(p: Sequence[Distribution], q: Sequence[Distribution], proposed: Sequence[int], rng: Rng) -> Verdict:
    """Accept token i with min(1, p_i / q_i); at the first rejection draw from norm(max(0, p_i - q_i)).

    If every token is accepted, one more is drawn from the distribution after the last.

    Args:
        p: the verifying model's distributions, one more than there are proposed tokens.
        q: the distributions that the proposed tokens were drawn from.
    """
    for i, token in enumerate(proposed):
        if not rng.bernoulli(acceptance(p[i], q[i], token)):
            return Verdict(i, draw(residual(p[i], q[i]), rng))
    return Verdict(len(proposed), draw(p[len(proposed)], rng))


def draw(distribution: Distribution, rng: Rng) -> int:
    """Draw a token from the distribution."""
    return distribution if isinstance(distribution, int) else rng.categorical(distribution)


def acceptance(p: Distribution, q: Distribution, token: int) -> float:
    """Return min(1, p(token) / q(token))."""
    ours = _of(p, token)
    return min(1.0, ours / _of(q, token)) if ours > 0 else 0.0


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return norm(max(0, p - q)), the distribution after a token of q was rejected."""
    if isinstance(p, int):
        return p
    rest = p.copy()
    if isinstance(q, int):
        rest[q] = 0.0
    else:
        rest = np.maximum(rest - q, 0.0)
    total = rest.sum()
    return rest / total if total > 0 else p  # equal up to rounding: a rejection then has no weight


def _of(distribution: Distribution, token: int) -> float:
    return float(distribution == token) if isinstance(distribution, int) else float(distribution[token])


class TokenSampler:
    """One request's sampling, with its own random number generator.

    Args:
        params: with temperature 0 every distribution is a single token.
        vocab_size: V, the columns of the target's logits.
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
        """Return the distribution of each row of logits (1 + F, V'). Row i follows `before` and the first i of `fed`.

        A draft's embedding may be padded to other rows than the target's. Tokens that only one of them has are never
        proposed: distributions are over the target's V tokens, and those that the draft lacks have probability 0.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        rows = logits.astype(mx.float32)
        if rows.shape[-1] != self._size:
            rows = rows[:, : self._size]
            rows = mx.pad(rows, [(0, 0), (0, self._size - rows.shape[-1])], constant_values=-mx.inf)
        if self.grammar is not None:
            rows = mx.where(self._grammar_mask(self.grammar, before, fed, rows.shape[-1]), rows, -mx.inf)
        if self._processors:
            rows = mx.concatenate([self._process(rows[i : i + 1], [*before, *fed[:i]]) for i in range(len(rows))])
        if self._filtered is None:
            certain: list[Distribution] = np.array(mx.argmax(rows, axis=-1)).tolist()
            return certain
        weights = np.exp(np.array(self._filtered(rows), dtype=np.float64))
        return list(weights / weights.sum(axis=-1, keepdims=True))

    def count_permitted(self, before: Sequence[int], tokens: Sequence[int]) -> int:
        """Return the number of leading `tokens` that the grammar permits after the generated tokens `before`.

        Raises:
            InvalidRequestError: the grammar has become too complex to follow.
        """
        if self.grammar is None:
            return len(tokens)
        ahead = self._ahead(self.grammar, before)
        for count, token in enumerate(tokens):
            mask = ahead.mask(max(self._size, token + 1))
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

    def _grammar_mask(self, grammar: GrammarState, before: Sequence[int], fed: Sequence[int], size: int) -> mx.array:
        """Return the grammar's mask of each row, (1 + F, V) bool."""
        ahead = self._ahead(grammar, before)
        masks = [ahead.mask(size)]
        for token in fed:
            ahead.accept(token)
            masks.append(ahead.mask(size))
        return mx.array(stack_masks(masks, size))

    def _ahead(self, grammar: GrammarState, before: Sequence[int]) -> GrammarState:
        """Return a copy of the grammar advanced by these generated tokens."""
        ahead = grammar.fork()
        for token in before[self._committed :]:
            ahead.accept(token)
        return ahead

    def _process(self, row: mx.array, text: Sequence[int]) -> mx.array:
        history, row = mx.array(list(text), dtype=mx.int32), mx.array(row)  # mlx-lm's processors write in place
        for process in self._processors:
            row = process(history, row)
        return row
