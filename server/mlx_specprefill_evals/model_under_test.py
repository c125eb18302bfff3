"""The protocol of a model under test: an engine in this process, or a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .arms import Arm
from .tasks import Item


@dataclass(frozen=True)
class Reply:
    """An answer after one arm's prefill, and the facts about the prefill.

    Attributes:
        kept: share of the prompt that the target read; None if unknown.
        measures: further numbers by name: recall, kl, top1, nll, right, same, seconds.
        score: score from the measures; None: the text decides.
    """

    text: str
    kept: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    score: float | None = None


class ModelUnderTest(Protocol):
    """A model that answers items."""

    @property
    def described(self) -> Mapping[str, str]:
        """Return the facts that a report and a resumed run must know about the model."""
        ...

    def count(self, text: str) -> int:
        """Return the number of a text's tokens, exact or estimated."""
        ...

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int) -> dict[Arm, Reply]:
        """Return the greedy answers of every arm that applies to the item.

        Args:
            seed: of the random arm.

        Raises:
            NotMeasuredError: there is no answer; the message says why.
        """
        ...
