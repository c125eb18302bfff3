"""The interface of all proposers, and the simplest one: a draft model, one token after another."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from .rollback import CacheSnapshots
from .streaming_cache import StreamingKVCache
from .token_sampler import TokenSampler
from .verification import Distribution, draw

__all__ = ["AcceptanceCounts", "DraftModelProposer", "Drafter", "Proposal", "Proposer", "Verified"]


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


class Proposer(Protocol):
    """One row's source of proposals. Its generators yield between forwards.

    Attributes:
        inner: acceptance of the level below, if there is one.
    """

    inner: AcceptanceCounts | None

    def recording(self) -> AbstractContextManager[Any]:
        """The context in which a forward of the target runs; its value becomes `Verified.recorded`."""
        ...

    def idle(self, text: Sequence[int]) -> bool:
        """Whether to wait for the token that follows the generated `text` is not worth it: nothing is known of it."""
        ...

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Generator[None, None, Proposal]:
        """About `count` tokens that may follow the generated `text`, all of which is final; fewer if it can't."""
        ...

    def settle(self, verified: Verified) -> None:
        """Take note of the target's verification."""
        ...


class Drafter:
    """A model that drafts on a cache of its own, one token at a time.

    Args:
        cache: holds the prompt and the first `held` generated tokens.
    """

    def __init__(self, model: nn.Module, cache: list[Any], held: int = 0) -> None:
        self.model = model
        self.cache = cache
        self.held = held
        self._snapshots: CacheSnapshots | None = None
        self._settled = held  # tokens that can't be taken back
        self._streams = [part for part in cache if isinstance(part, StreamingKVCache)]

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Generator[None, None, Proposal]:
        logits = self._catch_up(text)
        proposal = Proposal()
        while True:
            (distribution,) = sampler.distributions(logits, [*text, *proposal.tokens])
            proposal.distributions.append(distribution)
            proposal.tokens.append(draw(distribution, sampler.rng))
            if len(proposal.tokens) >= count or proposal.tokens[-1] in sampler.stops:
                return proposal
            yield
            logits = self._step(proposal.tokens[-1])

    def keep(self, length: int, final: bool = False) -> None:
        """Forget what was fed after the first `length` generated tokens.

        Args:
            final: nothing before `length` will be taken back any more. Until then, all that was fed since can be.
        """
        if self._snapshots is not None and self.held > length:
            self._snapshots.restore(length - self._settled)
            self.held = length
        if final:
            self._snapshots = None
            for part in self._streams:
                part.evict()

    def _catch_up(self, text: Sequence[int]) -> mx.array:
        """Feed what is new; logits (1, V) of the last token."""
        unfed = text[self.held :]
        if self._snapshots is None:
            logits = self._feed(unfed)
            self._snapshots, self._settled = CacheSnapshots(self.cache), self.held
            return logits
        for token in unfed:
            logits = self._step(token)
        return logits

    def _step(self, token: int) -> mx.array:
        assert self._snapshots is not None
        logits = self._feed([token])
        self._snapshots.take()
        return logits

    def _feed(self, tokens: Sequence[int]) -> mx.array:
        logits: mx.array = self.model(mx.array([list(tokens)]), cache=self.cache)[:, -1, :]
        self.held += len(tokens)
        return logits


class DraftModelProposer:
    """Proposes what a draft model drafts."""

    inner: AcceptanceCounts | None = None

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def idle(self, text: Sequence[int]) -> bool:
        return False

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Generator[None, None, Proposal]:
        return self.drafter.propose(text, count, sampler)

    def settle(self, verified: Verified) -> None:
        self.drafter.keep(verified.length, final=True)
