"""How much of a prompt to keep, chosen from its scores: what `keep_pct` of "auto" means. Pure.

Heads that found what a question asks for look at a few chunks; heads that found nothing, or look for something that is
everywhere, look at all of them alike. The participation ratio of the chunks' scores says how many they look at. A
multiple of it is kept, the same multiple for every prompt: calibration decides which one loses seldom enough (`risk`).

What scores can't show is a question about all of what is found, like how often something is said: the heads look at
each place, but the answer is not in any of them. Its words are looked at.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import SelectionConfig
from .risk import fewest_items, last_certified
from .selection import select_tokens
from .text import PromptText

__all__ = ["CONFIDENCE", "MULTIPLES", "Choice", "ShareCurve", "about_everything", "choose_share", "effective_share"]

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

CONFIDENCE = 0.9  # with which a multiple's loss is known
# Tried in this order, from the most conservative one on: the order is fixed before any item is looked at.
MULTIPLES = (8.0, 6.0, 5.0, 4.0, 3.5, 3.0, 2.5, 2.25, 2.0, 1.75, 1.5, 1.25, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
_LEAST = Fraction(1, 20)
_MOST = 0.5  # of the chunks that are open to choice; to drop less than the rest gains little
_ROUNDING = 1e-6  # of a chunk
_WHOLE = re.compile(
    r"""\bhow\ (?:many|often)\b
    | \b(?:count|tally|enumerate|summari[sz]e|summary|overview|outline|gist|tl;?dr|proofread|paraphrase|rephrase)\b
    | \bnumber\ of\ (?:times|occurrences)\b
    | \b(?:list|name|give|find|show|extract|identify|collect|mention)\ (?:me\ )?(?:all|every|each)\b
    | \b(?:most|least)\ (?:common|frequent|often|frequently)\b
    | \b(?:main|key|central)\ (?:points?|ideas?|topics?|themes?|messages?)\b
    | \b(?:rewrite|reword|refactor|translate|reformat|convert|correct|edit|shorten|review)\ (?:the|this|it|all|my)\b
    | \b(?:everything|whole|entire|throughout|overall|all\ of\ (?:the|them|this)|in\ total|altogether)\b""",
    re.IGNORECASE | re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The share of chunks to keep, in [1/20, 1], and why; 1 is a full prefill."""

    share: Fraction
    reason: str


@dataclass(frozen=True, slots=True)
class ShareCurve:
    """What calibration saw: how often each of `MULTIPLES` would have lost something that the answer needs.

    Attributes:
        items: how many there were, each a draw of its own.
        misses: on how many of them, per multiple.
        kept: mean share of chunks that was kept, per multiple.
    """

    items: int
    misses: tuple[int, ...]
    kept: tuple[float, ...]

    def multiple(self, max_loss: float) -> float | None:
        """The smallest one whose expected loss is at most so much, with 90 % confidence; None: none is known to be."""
        last = last_certified(self.misses, self.items, max_loss, CONFIDENCE)
        return None if last is None else MULTIPLES[last]

    def refusal(self, max_loss: float) -> str:
        """Why there is no such multiple."""
        least = fewest_items(max_loss, CONFIDENCE)
        if self.items < least:
            return f"{self.items} calibration items can't show a loss of {max_loss:g}: it takes {least}"
        return f"the draft loses more than {max_loss:g} on its {self.items} calibration items"

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "multiples": list(MULTIPLES),
            "misses": list(self.misses),
            "kept": [round(share, 4) for share in self.kept],
        }

    @classmethod
    def from_dict(cls, values: Any) -> ShareCurve:
        """Raises ValueError: it is not what `to_dict` makes, or of other multiples."""
        try:
            found = cls(int(values["items"]), tuple(map(int, values["misses"])), tuple(map(float, values["kept"])))
            multiples = tuple(map(float, values["multiples"]))
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"no calibrated shares: {error!r}") from error
        sound = all(0 <= missed <= found.items for missed in found.misses)
        if multiples != MULTIPLES or not len(found.misses) == len(found.kept) == len(MULTIPLES) or not sound:
            raise ValueError("no calibrated shares: other multiples, or misses out of range")
        return found


def about_everything(question: str) -> str | None:
    """The words by which a question asks for all of a text, None where there are none. English only."""
    found = _WHOLE.search(question)
    return None if found is None else found.group()


def effective_share(chunk_scores: Floats, chunk_forced: Bools) -> float:
    """How many of the chunks that are open to choice the scores are spread over, as a share of them, in (0, 1].

    The participation ratio (sum s)^2 / (C * sum s^2): k of C equal scores and no others give k / C, equal scores 1.
    Without any score it is 1 as well: nothing was found.
    """
    scores = chunk_scores[~chunk_forced].astype(np.float64)
    total = float(scores.sum())
    if scores.size == 0 or total <= 0:
        return 1.0
    return float(total**2 / (scores.size * float((scores**2).sum())))


def choose_share(
    importance: Floats, forced: Bools, text: PromptText, question: str, multiple: float, config: SelectionConfig
) -> Choice:
    """What `multiple` means for one prompt.

    Args:
        importance, forced: (M,) per token.
        question: what is asked, as text.
    """
    words = about_everything(question)
    if words is not None:
        return Choice(Fraction(1), f'the question is about the whole prompt ("{words}")')
    ranked = select_tokens(importance, forced, text, Fraction(1), config)
    chunks, fixed = ranked.chunk_forced.size, int(ranked.chunk_forced.sum())
    spread = effective_share(ranked.chunk_scores, ranked.chunk_forced)
    if multiple * spread > _MOST:
        return Choice(Fraction(1), f"what the question asks for is spread over {spread:.0%} of the prompt")
    wanted = fixed + math.ceil(multiple * spread * (chunks - fixed) - _ROUNDING)
    share = min(max(Fraction(wanted, chunks), _LEAST), Fraction(1))
    return Choice(share, f"what the question asks for is found in {spread:.0%} of the prompt")
