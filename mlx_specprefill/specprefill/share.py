"""How much of a prompt to keep, chosen from its scores: what `keep_pct` of "auto" means. Pure.

Heads that found what a question asks for look at a few chunks; heads that found nothing, or look for something that is
everywhere, look at all of them alike. The participation ratio of the chunks' scores says how many they look at. A
multiple of it is kept, the same multiple for every prompt: calibration decides which one loses seldom enough
(`adapters.shares`).

What scores can't show is a question about all of what is found, like how often something is said: the heads look at
each place, but the answer is not in any of them. Its words are looked at.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ..config import SelectionConfig
from .selector import select_tokens
from .text import PromptText

__all__ = ["Choice", "about_everything", "choose_share", "effective_share"]

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

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

    @classmethod
    def everything(cls, words: str) -> Choice:
        """For a question that says so."""
        return cls(Fraction(1), f'the question is about the whole prompt ("{words}")')


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
        return Choice.everything(words)
    ranked = select_tokens(importance, forced, text, Fraction(1), config)
    chunks, fixed = ranked.chunk_forced.size, int(ranked.chunk_forced.sum())
    spread = effective_share(ranked.chunk_scores, ranked.chunk_forced)
    if multiple * spread > _MOST:
        return Choice(Fraction(1), f"what the question asks for is spread over {spread:.0%} of the prompt")
    wanted = fixed + math.ceil(multiple * spread * (chunks - fixed) - _ROUNDING)
    share = min(max(Fraction(wanted, chunks), _LEAST), Fraction(1))
    return Choice(share, f"what the question asks for is found in {spread:.0%} of the prompt")
