"""The interface of proposers, and the simplest one: a draft model that generates one token after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .rollback import Snapshot
from .token_sampler import TokenSampler
from .verification import Distribution, draw

__all__ = ["AcceptanceCounts", "Drafter", "Proposal", "Proposer", "Verified"]


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


class Drafter(Proposer):
    """A model that drafts on its own cache, one token at a time.

    Args:
        cache: holds the prompt, or the part that the model has read.

    Attributes:
        held: generated tokens in the cache.
    """

    def __init__(self, model: nn.Module, cache: list[Any], gamma: int) -> None:
        self.model = model
        self.cache = cache
        self.gamma = gamma
        self.held = 0
        self._snapshot: Snapshot | None = None
        self._settled = 0  # tokens that can't be taken back

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        logits = self._catch_up(text)
        proposal = Proposal()
        while True:
            (distribution,) = sampler.distributions(logits, [*text, *proposal.tokens])
            proposal.distributions.append(distribution)
            proposal.tokens.append(draw(distribution, sampler.rng))
            if len(proposal.tokens) >= count or proposal.tokens[-1] in sampler.stops:
                return proposal
            logits = self._feed(proposal.tokens[-1:])

    def settle(self, verified: Verified) -> None:
        self.keep(verified.length)
        self._snapshot = None

    def keep(self, length: int) -> None:
        """Cut the cache to the first `length` generated tokens. More can be taken back until `settle`."""
        if self._snapshot is not None and self.held > length:
            self.held -= self._snapshot.take_back(self.held - length, fed=self.held - self._settled)

    def _catch_up(self, text: Sequence[int]) -> mx.array:
        """Feed the new tokens; return the logits (1, V) of the last one."""
        logits = self._feed(text[self.held :])
        if self._snapshot is None:
            self._snapshot, self._settled = Snapshot(self.cache), self.held
        return logits

    def _feed(self, tokens: Sequence[int]) -> mx.array:
        logits: mx.array = self.model(mx.array([list(tokens)]), cache=self.cache)[:, -1, :]
        self.held += len(tokens)
        return logits
