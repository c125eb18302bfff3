"""An answer that repeats itself without end, by its tokens: models fall into such loops, and clients wait for minutes.

What repeats for good reasons is left alone: rows of tables, white space, and runs without words, such as base64 or
lists of numbers. Within a fence of code, where lines may be alike, a loop has to be longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LONGEST_PERIOD = 64  # tokens
LEAST_REPEATS = 8
LEAST_TOKENS = 64  # of all repeats together
IN_CODE = 8  # times as many of both within a fence
EVERY = 16  # tokens between two looks
FENCE = "```"


@dataclass(eq=False)
class LoopGuard:
    """A guard of one answer.

    Args:
        decode: tokens to text.

    Attributes:
        found: a sentence about the loop; "": there is none.
    """

    decode: Callable[[Sequence[int]], str]
    found: str = field(default="", init=False)
    _tokens: list[int] = field(default_factory=list, init=False)

    def push(self, token: int) -> bool:
        """Add a token and return whether the answer repeats itself."""
        self._tokens.append(token)
        if len(self._tokens) % EVERY == 0 and (period := _period(self._tokens, 1)) and self._is_loop(period):
            self.found = f"loop: the same {period} tokens were repeated {LEAST_REPEATS} times and more"
        return bool(self.found)

    def _is_loop(self, period: int) -> bool:
        if not _has_words(self.decode(self._tokens[-2 * period :])):
            return False
        in_code = self.decode(self._tokens).count(FENCE) % 2 == 1
        return not in_code or _period(self._tokens, IN_CODE) > 0


def _period(tokens: Sequence[int], times: int) -> int:
    """Return the shortest period of the last tokens that repeats `times` as often as a loop must, else 0."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = times * max(LEAST_TOKENS, LEAST_REPEATS * period)
        if length > len(tokens):
            return 0
        if tokens[-1] == tokens[-1 - period] and tokens[-length:-period] == tokens[-length + period :]:
            return period
    return 0


def _has_words(text: str) -> bool:
    """Return whether a text is made of words: letters, with spaces between where the script has any; no table."""
    if "|" in text or "\t" in text:
        return False
    letters, signs = sum(map(str.isalpha, text)), len("".join(text.split()))
    is_spaced = not text.isascii() or signs < len(text)
    return is_spaced and letters > 0 and 2 * letters >= signs
