"""The verdict on a sparse answer as it is reported, frozen: whether full reading gives the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from .arrays import Bools


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """A comparison of an answer of T tokens with full reading. Both arrays are (T,); empty without a comparison.

    Attributes:
        agrees: bool. The token is full reading's own choice, but for the rounding of logits; of a sampled answer, full
            reading could have drawn it.
        counted: bool. Another token could have stood there that full reading would not write. Not so where a grammar or
            budget decides (it leaves one token, or not full reading's favourite), nor where every token could be drawn.
    """

    agrees: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    counted: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))

    def of_first(self, count: int) -> Verdict:
        """Return the verdict on the answer's first `count` tokens: what follows a stop string is no part of it."""
        return Verdict(self.agrees[:count], self.counted[:count])

    @property
    def word(self) -> Literal["same", "differs", "unknown"]:
        """Return "same" if all counted tokens agree, and "unknown" if there are none."""
        if not self.counted.any():
            return "unknown"
        return "same" if self.agrees[self.counted].all() else "differs"
