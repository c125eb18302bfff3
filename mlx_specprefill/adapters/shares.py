"""How often keeping a share of a prompt loses what its answer needs, as measured for one draft in calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .risk import fewest_items, last_certified

__all__ = ["CONFIDENCE", "MULTIPLES", "ShareCurve"]

CONFIDENCE = 0.9  # with which a multiple's loss is known
# Of what a draft's scores are spread over. Tried in this order, from the most conservative one on: the order is fixed
# before any item is looked at.
MULTIPLES = (8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.25, 2.0, 1.75, 1.5, 1.25, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


@dataclass(frozen=True, slots=True)
class ShareCurve:
    """How often each of `MULTIPLES` would have lost something that the answer needs, as measured in calibration.

    Attributes:
        items: how many there were, each a draw of its own.
        misses: on how many of them, per multiple.
        kept: mean share of chunks that was kept, per multiple.
        over_lines: the `SelectionConfig.over_lines` that this is true of.
    """

    items: int
    misses: tuple[int, ...]
    kept: tuple[float, ...]
    over_lines: bool = False

    def multiple(self, max_loss: float) -> float | None:
        """The smallest one whose expected loss is at most so much, with 90 % confidence; None: none is known to be."""
        last = last_certified(self.misses, self.items, max_loss, CONFIDENCE)
        return None if last is None else MULTIPLES[last]

    def refusal(self, max_loss: float) -> str:
        """Why there is no such multiple."""
        least = fewest_items(max_loss, CONFIDENCE)
        if self.items < least:
            return f"calibration certifies no loss of {max_loss:g} by {self.items} items: it takes {least}"
        enough = next((limit / 100 for limit in range(1, 100) if self.multiple(limit / 100) is not None), None)
        allowed = "" if enough is None else f"; it does for one of {enough:g}"
        return (
            f"calibration certifies no share for a loss of {max_loss:g} with {CONFIDENCE:.0%} confidence: the largest "
            f"loses something on {self.misses[0]} of {self.items} items{allowed}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "multiples": list(MULTIPLES),
            "misses": list(self.misses),
            "kept": [round(share, 4) for share in self.kept],
            "over_lines": self.over_lines,
        }

    @classmethod
    def from_dict(cls, values: Any) -> ShareCurve:
        """Raises ValueError: it is not what `to_dict` makes, or of other multiples."""
        try:
            counts = int(values["items"]), tuple(map(int, values["misses"])), tuple(map(float, values["kept"]))
            found = cls(*counts, bool(values.get("over_lines", False)))
            multiples = tuple(map(float, values["multiples"]))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"no calibrated shares: {error!r}") from error
        sound = all(0 <= missed <= found.items for missed in found.misses)
        if multiples != MULTIPLES or not len(found.misses) == len(found.kept) == len(MULTIPLES) or not sound:
            raise ValueError("no calibrated shares: other multiples, or misses out of range")
        return found
