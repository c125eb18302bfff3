"""The outcome of a verdict: how the tokens of an answer compare with full reading, summed up in one word."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from .arrays import Bools, Floats
from .request import TokenIds

_Z = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """A comparison of an answer of T tokens with full reading. All arrays are (T,); empty without a comparison.

    Attributes:
        reason: why there is no comparison; empty with one.
        tokens: int32, those of the answer.
        is_sampled: the tokens were drawn, not the likeliest ones.
        agrees: bool. The token is full reading's own choice, but for the rounding of logits; of a sampled answer, full
            reading could have drawn it.
        counted: bool. A grammar or budget did not decide on the token: more than one was allowed, and full reading's
            favourite was among them.
        own: int32, full reading's own choices under the request's penalties and grammar.
        full, own_full: natural-log probabilities under full reading, of the tokens and of `own`, before temperature,
            penalties and filters.
        sparse: those of the tokens under sparse reading.
    """

    reason: str = ""
    is_sampled: bool = False
    tokens: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    agrees: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    counted: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    own: TokenIds = field(default_factory=lambda: np.zeros(0, np.int32))
    full: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    own_full: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    sparse: Floats = field(default_factory=lambda: np.zeros(0, np.float32))

    def of_first(self, count: int) -> Verdict:
        """Return the verdict on the answer's first `count` tokens: what follows a stop string is no part of it."""
        names = ("tokens", "agrees", "counted", "own", "full", "own_full", "sparse")
        return replace(self, **{name: getattr(self, name)[:count] for name in names})

    @property
    def word(self) -> Literal["same", "differs", "unknown"]:
        if self.why_unknown:
            return "unknown"
        if self.first is not None:
            return "differs"
        low, high = self.interval
        return "same" if not self.is_sampled or low <= 0 <= high else "differs"

    @property
    def why_unknown(self) -> str:
        return self.reason or ("" if self.counted.any() else "no token was the model's own choice")

    @property
    def first(self) -> int | None:
        """Return the first counted token on which they disagree."""
        found = np.flatnonzero(self.counted & ~self.agrees)
        return int(found[0]) if found.size else None

    @property
    def nll_full(self) -> float:
        """Return the mean negative log-likelihood of the counted tokens under full reading, nats per token."""
        return -float(self.full[self.counted].mean())

    @property
    def nll_sparse(self) -> float:
        """Return the same under sparse reading."""
        return -float(self.sparse[self.counted].mean())

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the counted tokens' mean log-ratio, full to sparse. One token has no bounds."""
        ratios = self.full[self.counted].astype(np.float64) - self.sparse[self.counted]
        if ratios.size < 2:
            return -math.inf, math.inf
        half = _Z * float(ratios.std(ddof=1)) / math.sqrt(ratios.size)
        return float(ratios.mean()) - half, float(ratios.mean()) + half
