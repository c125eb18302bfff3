"""The key of a sparse prefix: how its tokens were chosen, and which later requests may go on from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

from ...config import RuleName, Scope


@dataclass(frozen=True, slots=True)
class SelectionKey:
    """The way in which a request chooses tokens. The sparse turns of one conversation share it.

    Attributes:
        share: of the chunks, as the request or the server states it.
        scope: the text that competes.
        forced: the request forces a sparse prefill.
        chooser: digest of draft and settings; empty until a cache is asked.
        estimates: what is not read is estimated, where that can be.
    """

    share: Fraction
    rule: RuleName
    scope: Scope
    forced: bool = False
    chooser: str = ""
    estimates: bool = False

    @property
    def unforced(self) -> SelectionKey:
        return replace(self, forced=False)

    def accepts(self, other: SelectionKey) -> bool:
        """Return whether a request may go on from what the other one left; one with a forced key only from its like."""
        return other == self or other.unforced == self

    def __str__(self) -> str:
        """Return the text that is stored, of which `parse` makes the key again."""
        marks = [*(["forced"] if self.forced else []), *(["estimated"] if self.estimates else [])]
        return ":".join([self.chooser, str(self.share), self.rule, self.scope, *marks])

    @classmethod
    def parse(cls, text: str) -> SelectionKey:
        """Return the key of a stored text.

        Raises:
            ValueError: it is no such text.
        """
        chooser, share, rule, scope, *marks = text.split(":")
        try:
            parsed = Fraction(share)
        except ZeroDivisionError as error:
            raise ValueError(f"{share} is no share") from error
        key = cls(parsed, cast(RuleName, rule), cast(Scope, scope), "forced" in marks, chooser, "estimated" in marks)
        if str(key) != text:
            raise ValueError(f"{text!r} is no selection key of this version")
        return key


Accepts = Callable[[SelectionKey], bool]


def accepted_by(key: SelectionKey | None) -> Accepts:
    """Return what a request with this key accepts; without one, no sparse prefix."""
    return (lambda _: False) if key is None else key.accepts
