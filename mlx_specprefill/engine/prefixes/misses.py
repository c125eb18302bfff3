"""The reason why a prompt is read again: where it leaves a cached prompt whose later text it shares, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ...arrays import Bools
from ...prefill_report import MissKind, PrefixMiss
from ...request import GenerationRequest, TokenIds
from .edits import GRAM, hashes

Decode = Callable[[Sequence[int]], str]

WORTH_TELLING = 1024  # tokens
_WINDOW = 64  # tokens on both sides of the difference that are read as text
_SHOWN = 80  # characters: the name of a tool stands some 50 behind where it begins
_BACK = 24  # characters in front of the difference that may belong to its word
_BORDERS = " \t\n\r\"'`>(){},;"  # of words
_TIME = re.compile(
    r"\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[AP]M)?"
    r"|\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}"
    r"|\b1[5-9]\d{8}(\d{3})?\b"  # seconds or milliseconds since the epoch
    r"|\b(Mon|Tue|Tues|Wed|Wednes|Thu|Thurs|Fri|Sat|Satur|Sun)(day)?\b"
    r"|(\b\d{1,2} )?\b(Jan(uary)?|Feb(ruary)?|Mar(ch)?|Apr(il)?|May|June?|July?|Aug(ust)?|Sep(t|tember)?|Oct(ober)?"
    r"|Nov(ember)?|Dec(ember)?)\b\.?( \d{1,2}\b)?(,? \d{4}\b)?"
)
_REASONING = re.compile(  # that is not empty
    r"[<\[][^<>\[\]\s/]{0,16}think[^<>\[\]\s]{0,8}[>\]]\s*[^\s<\[]|channel\|?>(analysis|thought)", re.IGNORECASE
)
_TOOLS = re.compile(r"name|tool|function|parameters", re.IGNORECASE)


def explain_miss(request: GenerationRequest, others: tuple[int, list[TokenIds]], decode: Decode) -> PrefixMiss | None:
    """Return the reason; None if no cached prompt has `WORTH_TELLING` of the tokens behind the difference.

    Args:
        others: the number of tokens that the prompt shares with cached prompts, and these prompts, at least one. At
            least `WORTH_TELLING` tokens follow.
    """
    start, cached = others
    new = request.prompt[start:]
    grams = _Grams(new)
    shared, old = max(((grams.count_shared(tokens[start:]), tokens) for tokens in cached), key=itemgetter(0))
    if shared < WORTH_TELLING:
        return None
    left_out, added = grams.resume_point(old[start:])
    first = max(start - _WINDOW, 0)
    text = _Difference.between(
        decode(old[first : start + min(left_out + GRAM, _WINDOW)].tolist()),
        decode(request.prompt[first : start + min(added + GRAM, _WINDOW)].tolist()),
        both_resume=max(left_out, added) + GRAM <= _WINDOW,
    )
    moved = left_out == 0 and added >= GRAM and grams.begins_in(old[start:])
    message = next((i for i, span in enumerate(request.spans) if span.start <= start < span.end), None)
    return PrefixMiss(
        _kind(request, message, start, text, moved),
        start,
        message,
        None if message is None else request.spans[message].kind,
        shared,
        text.before[-_SHOWN:],
        text.was[:_SHOWN] if request.label.is_of_one else None,
        text.now[:_SHOWN],
    )


class _Grams:
    """The runs of `GRAM` tokens of one text, as hashes."""

    def __init__(self, tokens: TokenIds) -> None:
        self._hashes = hashes(tokens)

    def count_shared(self, tokens: TokenIds) -> int:
        """Return how many tokens of another text stand in runs that this one has, too."""
        runs = self._runs(tokens)
        begun = np.count_nonzero(runs[:1]) + np.count_nonzero(runs[1:] & ~runs[:-1])
        return int(np.count_nonzero(runs) + begun * (GRAM - 1))

    def resume_point(self, tokens: TokenIds) -> tuple[int, int]:
        """Return how many tokens of another text, and of this one, precede the first run that both have."""
        first = int(self._runs(tokens).argmax())
        return first, int((self._hashes == hashes(tokens[first : first + GRAM])).argmax())

    def begins_in(self, tokens: TokenIds) -> bool:
        """Return whether another text has this one's first run."""
        return bool((hashes(tokens) == self._hashes[0]).any())

    def _runs(self, tokens: TokenIds) -> Bools:
        """Return where another text has a run of this one."""
        return np.isin(hashes(tokens), self._hashes)


class _Difference(NamedTuple):
    """The text before a difference, both versions of it in whole words, and whether both have a time there."""

    before: str
    was: str
    now: str
    is_time: bool

    @classmethod
    def between(cls, old: str, new: str, both_resume: bool) -> _Difference:
        """Return the difference of two windows that begin alike.

        Args:
            both_resume: they also end alike.
        """
        at = _common(old, new)
        start = max(old.rfind(border, max(at - _BACK, 0), at) + 1 for border in _BORDERS) or at
        behind = _common(old[start:][::-1], new[start:][::-1]) if both_resume else 0
        while behind and old[len(old) - behind] not in _BORDERS:
            behind -= 1
        is_time = all(any(match.start() <= at < match.end() for match in _TIME.finditer(text)) for text in (old, new))
        return cls(old[:start], old[start : len(old) - behind], new[start : len(new) - behind], is_time)

    @property
    def is_reasoning(self) -> bool:
        """Return whether one of the versions has reasoning and the other has none."""
        return _has_reasoning(self.before[-_BACK:] + self.was) != _has_reasoning(self.before[-_BACK:] + self.now)

    @property
    def is_of_tools(self) -> bool:
        return bool(_TOOLS.search(self.before[-_SHOWN:] + self.now))


def _kind(request: GenerationRequest, message: int | None, start: int, text: _Difference, moved: bool) -> MissKind:
    """Return the kind of a difference at the token `start`.

    Args:
        moved: the new text there is in the cached prompt, too, at a later place.
    """
    span = None if message is None else request.spans[message]
    role = None if span is None else span.kind
    if role == "assistant" and text.is_reasoning:
        return "reasoning"
    if moved and role in ("system", "tools") and text.is_of_tools:
        return "tool_order"
    if text.is_time:
        return "time"
    if _is_numbered(text.was) and _is_numbered(text.now):
        return "counter"
    if not request.spans or role == "other":
        return "other"
    if span is not None and span.start < span.content_start <= start < span.content_end:  # else the template's own text
        return "edited"
    return "edited" if role in ("system", "tools") and text.is_of_tools else "template"


def _has_reasoning(text: str) -> bool:
    return bool(_REASONING.search(text))


def _is_numbered(words: str) -> bool:
    """Return whether there are words, and each has a digit."""
    return bool(words.strip()) and all(any(map(str.isdigit, word)) for word in words.split())


def _common(one: str, other: str) -> int:
    """Return the length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
