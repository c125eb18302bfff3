"""What a prefill will take, from what prefills took on this machine. Pure.

One forward over n tokens behind s others takes `fixed + token * n + pair * n * s + square * n * n`: the launch,
everything that is linear in the tokens, attention to what was there, and attention among the new tokens, of which fused
kernels compute half and others all. A sparse request costs the draft over the whole prompt, its look-ahead, and the
target over what is kept; a full one the target over everything. All of it is measured, never derived from parameter
counts: the share of parameters that a token activates predicts times badly on mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from ...config import SpecPrefillPolicy
from ...request import Prediction

__all__ = ["ModelCost", "PairCost", "Sample", "break_even", "fit"]

_LONGEST = 1 << 20  # tokens; where the search for the break-even length gives up
_EXACT = 1e-3  # relative error below which samples count alike
_ROUNDS = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured forward: `tokens` behind `offset` others. For an end, `offset` counts its own tokens too."""

    tokens: int
    offset: int
    ms: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Milliseconds of forwards of one model.

    Attributes:
        fixed_ms, token_ms, pair_ms, square_ms: of a forward over many tokens, see the module's docstring.
        end_ms, end_token_ms: what follows the last slice of a prompt of n tokens: `end_ms + end_token_ms * n`. For a
            target that is the last few tokens and the logits, for a draft the last one, the look-ahead and the scores.
        end_tokens: how many tokens of the prompt that end reads.
    """

    fixed_ms: float
    token_ms: float
    pair_ms: float
    square_ms: float
    end_ms: float
    end_token_ms: float
    end_tokens: int

    def prefill_ms(self, tokens: int, offset: int = 0, step: int = 2048) -> float:
        """A prefill of `tokens` behind `offset`, in forwards of `step` tokens, with its end."""
        read = max(tokens - self.end_tokens, 0)
        forwards, rest = divmod(read, step)
        squares = forwards * step**2 + rest**2
        pairs = read * offset + (read**2 - squares) / 2  # every token meets those of earlier forwards
        middle = self.fixed_ms * (forwards + (rest > 0)) + self.token_ms * read
        middle += self.pair_ms * pairs + self.square_ms * squares
        return middle + self.end_ms + self.end_token_ms * (offset + tokens)

    def without(self, first: ModelCost) -> ModelCost:
        """Of the layers behind its first ones, which cost so much by themselves."""
        names = ("fixed_ms", "token_ms", "pair_ms", "square_ms")
        return replace(self, **{name: max(0.0, getattr(self, name) - getattr(first, name)) for name in names})


@dataclass(frozen=True, slots=True)
class PairCost:
    """What target and draft cost on this machine, and the tokens per forward with which they cost least.

    The draft's are no more than the target's: a forward's activations grow with them, and a sparse prefill should never
    need more memory than a full one.

    Attributes:
        staged: the draft is the target's own first layers, which don't read the kept tokens again.
        draft_ratio: how many tokens the draft reads for one of the target's.
    """

    target: ModelCost
    draft: ModelCost
    target_step: int
    draft_step: int
    staged: bool = False
    draft_ratio: float = 1.0

    def steps(self, longest: int) -> tuple[int, int]:
        """The best tokens per forward of target and draft, none above `longest`."""
        return min(self.target_step, longest), min(self.draft_step, longest)

    def predict(
        self, tokens: int, kept: int, cached: int = 0, draft_cached: int = 0, steps: tuple[int, int] | None = None
    ) -> Prediction:
        """Both ways to continue a prompt.

        Args:
            tokens: M, the whole prompt.
            kept: tokens of the uncached rest that the target would see.
            cached, draft_cached: prompt tokens that the target's and the draft's prefix cache hold.
            steps: tokens per forward of target and draft; None: the best.
        """
        step, draft_step = (self.target_step, self.draft_step) if steps is None else steps
        full = self.target.prefill_ms(tokens - cached, cached, step)
        new, held = round((tokens - draft_cached) * self.draft_ratio), round(draft_cached * self.draft_ratio)
        draft = self.draft.prefill_ms(new, held, draft_step)
        other = self.target.without(self.draft) if self.staged else self.target
        return Prediction(full, draft + other.prefill_ms(kept, cached, step))


def break_even(cost: PairCost, policy: SpecPrefillPolicy, longest: int = _LONGEST) -> int | None:
    """The shortest uncached prompt, in tokens, from which on sparse prefill is worthwhile; None up to `longest`."""
    share = float(policy.keep_pct)

    def pays(tokens: int) -> bool:
        return cost.predict(tokens, max(1, round(share * tokens))).pays(policy)

    low, high = 1, longest
    if not pays(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle + 1, high)
    return low


def fit(forwards: Iterable[Sample], ends: Iterable[Sample]) -> ModelCost:
    """The coefficients behind measured forwards, some of which other work on the machine has slowed down.

    Args:
        forwards: slices over many tokens.
        ends: what followed a last slice.

    Raises:
        ValueError: without samples.
    """
    slices, last = list(forwards), list(ends)
    if not slices or not last:
        raise ValueError("nothing was measured")
    rows = [(1.0, s.tokens, s.tokens * s.offset, s.tokens**2) for s in slices]
    fixed, token, pair, square = _undisturbed(np.array(rows), np.array([s.ms for s in slices]))
    end, end_token = _undisturbed(np.array([(1.0, s.offset) for s in last]), np.array([s.ms for s in last]))
    return ModelCost(fixed, token, pair, square, end, end_token, last[0].tokens)


def _undisturbed(columns: np.ndarray, ms: np.ndarray) -> list[float]:
    """Non-negative coefficients with the smallest sum of relative errors, by least squares whose weights follow them.

    Half of the samples lie below such a fit, and how slow the others were does not matter.
    """
    weights = np.ones(len(ms))
    for _ in range(_ROUNDS):
        found = _non_negative(columns / ms[:, None], weights)
        weights = 1 / np.maximum(np.abs(1 - columns @ found / ms), _EXACT)
    return found


def _non_negative(rows: np.ndarray, weights: np.ndarray) -> list[float]:
    """Least squares of `rows @ coefficients = 1` over all subsets of columns; the best without negative ones."""
    count = rows.shape[1]
    best, best_error = [0.0] * count, float("inf")
    root = np.sqrt(weights)
    scaled = rows * root[:, None]
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part = scaled[:, chosen]
            values = np.linalg.lstsq(part, root, rcond=None)[0]
            error = float(((part @ values - root) ** 2).sum())
            if (values >= 0).all() and error < best_error - 1e-12:
                best, best_error = [0.0] * count, error
                for index, value in zip(chosen, values, strict=True):
                    best[index] = float(value)
    return best
