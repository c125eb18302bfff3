"""The interface of what proposes tokens of an answer: propose, settle by the verification, count what was accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .verification import Distribution, TokenSampler, draw


@dataclass(frozen=True)
class Proposal:
    """Tokens that may follow the text, and the distributions that they were drawn from."""

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)


@dataclass(frozen=True)
class Verified:
    """The outcome of a verification.

    Attributes:
        length: generated tokens that the target's cache holds now.
        proposed, accepted: tokens of the proposal.
        row: the last kept token's row in the verification's forward.
        recorded: the proposer's record of that forward.
    """

    length: int
    proposed: int
    accepted: int
    row: int
    recorded: Any = None


@dataclass
class AcceptanceCounts:
    """Counts of proposed and accepted tokens of one level. Tokens after a rejected one do not count."""

    judged: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        self.judged += min(proposed, accepted + 1)
        self.accepted += accepted

    @property
    def rate(self) -> float | None:
        """Return the accepted share of the judged tokens."""
        return self.accepted / self.judged if self.judged else None


class Proposer(ABC):
    """One row's source of proposals.

    Attributes:
        gamma: tokens to ask for at a time.
        inner: acceptance of the level below, if there is one.
    """

    gamma: int
    inner: AcceptanceCounts | None = None

    def recording(self) -> AbstractContextManager[Any]:
        """Return the context in which a forward of the target runs. Its value becomes `Verified.recorded`."""
        return nullcontext()

    def idle(self, text: Sequence[int]) -> bool:
        """Return whether the generated `text` gives no hint, so that the row does not wait for its next token."""
        return False

    @abstractmethod
    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """Return about `count` tokens that may follow the final generated `text`; fewer if it can't."""

    @abstractmethod
    def settle(self, verified: Verified) -> None:
        """Update from the target's verification."""


def draft_tokens(
    logits: mx.array,
    feed: Callable[[Sequence[int]], mx.array],
    text: Sequence[int],
    count: int,
    sampler: TokenSampler,
) -> Proposal:
    """Draw up to `count` tokens one at a time.

    Args:
        logits: after `text`, (1, V).
        feed: feeds a token, and returns the logits after it.
    """
    proposal = Proposal()
    while True:
        (distribution,) = sampler.distributions(logits, [*text, *proposal.tokens])
        proposal.distributions.append(distribution)
        proposal.tokens.append(draw(distribution, sampler.rng))
        if len(proposal.tokens) >= count or proposal.tokens[-1] in sampler.stops:
            return proposal
        logits = feed(proposal.tokens[-1:])
