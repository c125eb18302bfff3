"""Ends an answer that repeats itself, by its tokens: models fall into such loops, and clients wait for minutes.

Useful repetitions are left alone: rows of tables, white space, and runs without words, such as base64 or
lists of numbers. Code, also in a call, and signs without words may be alike for long: there a loop has to be longer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

LONGEST_PERIOD = 64  # tokens
LEAST_REPEATS = 8
LEAST_TOKENS = 64  # of all repeats together
IN_CODE = 8  # times as many of both
EVERY = 16  # tokens between two looks
FENCE = re.compile("^ *(?:```|~~~)", re.MULTILINE)
LONGEST_WORD = 60  # characters
BLOB = re.compile(r"[A-Za-z0-9+/=_-]*")  # of base64, in both alphabets
RULES = frozenset("-=_*#~+")  # signs that draw lines
ROW = re.compile(  # Markdown, HTML, LaTeX, values between commas
    r"[|\t]|</?t[dhr]>|\\\\$|^[^,()\[\]{}=]+(?:,(?! )[^,()\[\]{}=]*)+$|^\w+(?:, \w+){2,}$"
)
CODE = re.compile(r"[;{}]\n|\n[ \t]+\S")  # ends of statements, indentation
INLINE = re.compile("`[^`]+`")  # within prose
CODE_SIGNS = frozenset("<>{}[]()=_/\\&|`$@^~+;")
PROSE_PER_SIGN = 10  # characters; where there are fewer for each of these signs, it is code

Kind = Literal["words", "code", "data"]


@dataclass(eq=False)
class LoopGuard:
    """A guard of one answer.

    Args:
        decode: tokens to text.
        exempt: the names of tools whose calls follow a grammar, and are not guarded.

    Attributes:
        found: a sentence about the loop; "": there is none.
    """

    decode: Callable[[Sequence[int]], str]
    exempt: frozenset[str] = frozenset()
    found: str = field(default="", init=False)
    _tokens: list[int] = field(default_factory=list, init=False)

    def push(self, token: int, call: str = "") -> bool:
        """Add a token and return whether the answer repeats itself. `call` is the name of the tool that is called."""
        self._tokens.append(token)
        if len(self._tokens) % EVERY or call in self.exempt:
            return False
        if (period := _period(self._tokens, 1)) and self._is_loop(period, in_call=bool(call)):
            self.found = f"loop: the same {period} tokens were repeated {LEAST_REPEATS} times and more"
        return bool(self.found)

    def _is_loop(self, period: int, in_call: bool) -> bool:
        kind = _kind(self.decode(self._tokens[-2 * period :]))
        if kind == "data":
            return False
        if _period(self._tokens, IN_CODE):
            return True
        return kind == "words" and not in_call and len(FENCE.findall(self.decode(self._tokens))) % 2 == 0


def _period(tokens: Sequence[int], times: int) -> int:
    """Return the shortest period of the last tokens that repeats `times` as often as a loop must, else 0."""
    for period in range(1, LONGEST_PERIOD + 1):
        length = times * max(LEAST_TOKENS, LEAST_REPEATS * period)
        if length > len(tokens):
            return 0
        if tokens[-1] == tokens[-1 - period] and tokens[-length:-period] == tokens[-length + period :]:
            return period
    return 0


def _kind(text: str) -> Kind:
    """Return what a text is that stands twice at an answer's end."""
    signs = "".join(text.split())
    letters, digits = (sum(map(test, signs)) for test in (str.isalpha, str.isdigit))
    if digits > letters or RULES.issuperset(signs) or _is_table(text) or _is_blob(text):
        return "data"
    many = PROSE_PER_SIGN * sum(map(CODE_SIGNS.__contains__, INLINE.sub("", signs))) >= len(signs)
    return "code" if many or 2 * letters < len(signs) or CODE.search(text) else "words"


def _is_blob(text: str) -> bool:
    """Return whether it has a run that is longer than a word, or nothing else."""
    longest = max(text.split(), key=len, default="")
    return BLOB.fullmatch(longest) is not None and len(longest) > min(LONGEST_WORD, len(text) - 1)


def _is_table(text: str) -> bool:
    """Return whether all whole lines are rows."""
    lines = [line.strip() for line in text.split("\n")[1:-1]]
    return any(lines) and all(ROW.search(line) for line in lines if line)
