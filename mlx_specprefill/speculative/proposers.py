"""What proposers have in common, and the simplest one: a draft model, one token after another."""

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
        row: of the verification's forward, that of the last token that stayed.
        recorded: what the proposer recorded in that forward.
    """

    length: int
    proposed: int
    accepted: int
    row: int
    recorded: Any = None


@dataclass
class AcceptanceCounts:
    """How many proposed tokens of one level were accepted. Tokens after a rejected one were not judged."""

    judged: int = 0
    accepted: int = 0

    def add(self, proposed: int, accepted: int) -> None:
        self.judged += min(proposed, accepted + 1)
        self.accepted += accepted

    @property
    def rate(self) -> float | None:
        """Accepted share of the judged tokens."""
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
        """The context in which a forward of the target runs; its value becomes `Verified.recorded`."""
        return nullcontext()

    def idle(self, text: Sequence[int]) -> bool:
        """Whether to wait for the token that follows the generated `text` is not worth it: nothing is known of it."""
        return False

    @abstractmethod
    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """About `count` tokens that may follow the generated `text`, all of which is final; fewer if it can't."""

    @abstractmethod
    def settle(self, verified: Verified) -> None:
        """Take note of the target's verification."""


class Drafter(Proposer):
    """A model that drafts on a cache of its own, one token at a time.

    Args:
        cache: holds the prompt, or what the model knows of it.

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
        """Hold no more than the first `length` generated tokens. Until `settle`, more can be taken back."""
        if self._snapshot is not None and self.held > length:
            self.held -= self._snapshot.take_back(self.held - length, fed=self.held - self._settled)

    def _catch_up(self, text: Sequence[int]) -> mx.array:
        """Feed what is new; logits (1, V) of the last token."""
        logits = self._feed(text[self.held :])
        if self._snapshot is None:
            self._snapshot, self._settled = Snapshot(self.cache), self.held
        return logits

    def _feed(self, tokens: Sequence[int]) -> mx.array:
        logits: mx.array = self.model(mx.array([list(tokens)]), cache=self.cache)[:, -1, :]
        self.held += len(tokens)
        return logits
