"""The promise of `specprefill_keep_pct: "auto"`: at most a given part of sparse answers differs from full reading.

A share of the prompt is tried on answers that are compared before they are sent. It is used, and compared afterwards,
once a bet against "more than `max_differ` of the answers at this share differ" has won enough. Bets that are fixed in
advance win that much with a probability of at most `_RISK` at any time, whatever the order of answers, as long as the
answers' mean chance of differing is above `max_differ` (Waudby-Smith and Ramdas 2024, Ville's inequality). One share is
tried after the other, so each has a part of the risk. A share that differs too often is given up for the next larger.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len
from pydantic import ConfigDict, Field, TypeAdapter

from mlx_specprefill import GenerationRequest

SHARES = (Fraction(1, 10), Fraction(1, 5), Fraction(3, 10), Fraction(1, 2))  # then all is read
_RISK = 0.05
_ENOUGH = len(SHARES) / _RISK
_BETS = (0.6, 0.95)  # parts of the money that a difference loses
_LOST = 0.5  # of the first money, after two differences
_Count = Annotated[int, Field(ge=0)]
_COUNTS = TypeAdapter(
    dict[str, Annotated[list[Annotated[list[_Count], Len(2, 2)]], Len(len(SHARES), len(SHARES))]],
    config=ConfigDict(strict=True),
)
_DOCUMENT = 2048  # tokens of the newest user message


def kind_of(request: GenerationRequest) -> str:
    """Return the kind of a request whose answers have counts of their own: chat, tools or document."""
    kinds = {span.kind for span in request.spans}
    if kinds & {"tools", "tool"}:
        return "tools"
    question = next((span for span in reversed(request.spans) if span.kind == "user"), None)
    size = len(request.prompt) if question is None else question.end - question.start
    return "document" if size > _DOCUMENT else "chat"


def wealth(same: Any, differs: Any, max_differ: float) -> Any:
    """Return what is left of 1 after bets on so many answers; numbers or arrays of them."""
    gain = max_differ / (1 - max_differ)
    return sum((1 + bet * gain) ** same * (1 - bet) ** differs for bet in _BETS) / len(_BETS)


def holds(same: Any, differs: Any, max_differ: float) -> Any:
    """Return whether at most `max_differ` of the answers differ, with 95 % confidence for all shares together."""
    return wealth(same, differs, max_differ) >= _ENOUGH


def is_hopeless(same: Any, differs: Any, max_differ: float) -> Any:
    """Return whether a share is to be given up."""
    return (differs >= 2) & (wealth(same, differs, max_differ) < _LOST)


@dataclass(frozen=True, slots=True)
class Promise:
    """The share for one request.

    Attributes:
        name: of the key and the kind of request.
        share: of the prompt's chunks; 1: all of it.
        same, differs: answers so far that were compared at this share.
    """

    name: str
    share: Fraction
    same: int
    differs: int
    max_differ: float

    @property
    def is_held(self) -> bool:
        """Return whether answers at this share may be sent before they are compared."""
        return self.share == 1 or bool(holds(self.same, self.differs, self.max_differ))

    def to_dict(self) -> dict[str, Any]:
        cents = range(1, 1000)
        bound = bisect_left(cents, True, key=lambda n: bool(holds(self.same, self.differs, n / 1000)))
        return {
            "share": float(self.share),
            "max_differ": self.max_differ,
            "held": self.is_held,
            "same": self.same,
            "differs": self.differs,
            "bound": 0.0 if self.share == 1 else (bound + 1) / 1000,
        }


class Promises:
    """The counts of each key and kind, in a file of numbers. Used on the event loop.

    Args:
        file: where counts survive a restart; None: nowhere.
    """

    def __init__(self, file: Path | None, max_differ: float) -> None:
        self._file = file
        self._max_differ = max_differ
        self._counts: dict[str, list[list[int]]] = {}  # by name, [same, differs] of each share
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._counts = _COUNTS.validate_json(file.read_bytes())

    def of(self, name: str) -> Promise:
        """Return the smallest share that is not given up."""
        for share, (same, differs) in zip(SHARES, self._counts.get(name, [[0, 0]] * len(SHARES)), strict=True):
            if not is_hopeless(same, differs, self._max_differ):
                return Promise(name, share, same, differs, self._max_differ)
        return Promise(name, Fraction(1), 0, 0, self._max_differ)

    def learn(self, name: str, share: Fraction, is_same: bool) -> None:
        """Count one comparison."""
        if share not in SHARES:
            return
        counts = self._counts.setdefault(name, [[0, 0] for _ in SHARES])
        counts[SHARES.index(share)][0 if is_same else 1] += 1
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk costs what was learnt, no answer
            self._file.parent.mkdir(parents=True, exist_ok=True)
            new = self._file.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._counts))
            new.replace(self._file)
