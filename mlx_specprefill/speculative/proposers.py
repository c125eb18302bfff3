"""The interface of proposers, and the two simplest: a draft model, and n-grams of the text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..cache.positioned import Snapshot
from ..config import SpeculationConfig
from ..request import TokenIds
from .verification import Distribution, TokenSampler, draw

_LONGEST = 32  # compared tokens of a match
_FIRST = 2  # proposed tokens before any result is known


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


class Drafter(Proposer):
    """A model that drafts on its own cache, one token at a time.

    Args:
        cache: holds the prompt, or the part that the model has read.
        vocab_size: rows of its embedding. The target may have more: it reads its last row for tokens without one.

    Attributes:
        held: generated tokens in the cache.
    """

    def __init__(self, model: nn.Module, cache: list[Any], gamma: int, vocab_size: int | None = None) -> None:
        self.model = model
        self.cache = cache
        self.gamma = gamma
        self._vocab_size = vocab_size
        self.held = 0
        self._snapshot: Snapshot | None = None
        self._settled = 0  # tokens that can't be taken back

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        return draft_tokens(self._catch_up(text), self._feed, text, count, sampler)

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
        ids = mx.array([list(tokens)])
        if self._vocab_size is not None:
            ids = mx.minimum(ids, self._vocab_size - 1)
        logits: mx.array = self.model(ids, cache=self.cache)[:, -1, :]
        self.held += len(tokens)
        return logits


class NgramProposer(Proposer):
    """Proposes the continuation of an earlier occurrence of the last tokens, without a model (prompt lookup).

    The last tokens of the text are searched in the prompt and in the answer so far, and the continuation of the longest
    match is proposed. It is often right where an answer repeats its prompt: an edited file, a quote, a tool call with
    names from the context. After a sparse prefill the whole prompt is searched, including dropped tokens; the target
    verifies every token in any case.

    Adapts the number of proposed tokens to the last result: doubled after a proposal that was accepted in full, else
    the number accepted. After a proposal without accepted tokens, a match has to be twice as long; after the next right
    one, the normal length. So an answer that does not repeat its prompt costs little.

    Args:
        prompt: its token ids.
        config: `ngram` and `ngram_match` are used.
    """

    def __init__(self, prompt: TokenIds, config: SpeculationConfig) -> None:
        self.gamma = config.ngram
        self._text = np.asarray(prompt, dtype=np.int32)
        self._size = self._text.size  # used part: the prompt and the tokens of the answer
        self._prompt_size = self._size
        self._shortest = self._least = config.ngram_match
        self._trusted = _FIRST

    def idle(self, text: Sequence[int]) -> bool:
        """Return True if the last tokens have no match. A match that the next token begins is found one token later."""
        self._follow(text)
        return continuation_of(self._text[: self._size], self._least, 1).size == 0

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        """Propose without a forward."""
        self._follow(text)
        ids = continuation_of(self._text[: self._size], self._least, min(count, self._trusted))
        tokens: list[int] = ids[: sampler.count_permitted(text, ids.tolist())].tolist()
        return Proposal(tokens, list(tokens))

    def settle(self, verified: Verified) -> None:
        if verified.proposed:
            whole = verified.accepted == verified.proposed
            self._trusted = max(1, 2 * verified.accepted if whole else verified.accepted)
            self._least = self._shortest if verified.accepted else min(2 * self._least, _LONGEST)

    def _follow(self, text: Sequence[int]) -> None:
        """Append the answer's new tokens."""
        size = self._prompt_size + len(text)
        if size > self._text.size:
            self._text = np.concatenate([self._text, np.zeros(max(256, self._text.size // 4, len(text)), np.int32)])
        self._text[self._size : size] = text[self._size - self._prompt_size :]
        self._size = size


def continuation_of(text: npt.NDArray[np.int32], least: int, count: int) -> npt.NDArray[np.int32]:
    """Return the continuation of the best earlier match of the end of `text`: at most `count` ids, or none.

    The best match is the longest one, the latest of several.

    Args:
        text: (T,) ids.
        least: tokens that have to be the same.
    """
    size = text.size
    places = np.flatnonzero(text[:-1] == text[-1:])  # earlier occurrences of the last token
    length = min(1, places.size)
    while places.size and length < min(_LONGEST, size - 1):
        longer = places[(places >= length) & (text[places - length] == text[size - 1 - length])]
        if not longer.size:
            break
        places, length = longer, length + 1
    if not places.size or length < least:
        return text[:0]
    start = int(places[-1]) + 1
    return text[start : start + count]
