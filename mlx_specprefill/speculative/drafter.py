"""Proposals of a draft model, on a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..cache.positioned import Snapshot
from .proposer import Proposal, Proposer, Verified, draft_tokens
from .verification import TokenSampler


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
