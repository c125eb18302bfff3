"""Proposals of a draft model, on a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..cache.positioned import Snapshot
from ..errors import Refused
from ..request import TokenIds
from .acceptance import TokenSampler
from .proposer import Held, Models, Proposal, Proposer, Verified, draft_tokens


class Drafter(Proposer):
    """The draft, one token at a time.

    Its embedding may have fewer rows than the target's: it reads its last row for tokens without one.

    Attributes:
        cache: holds the prompt, or the part that the model has read.
        held: generated tokens in the cache.
    """

    uses_draft = True

    def __init__(self, models: Models, prompt: TokenIds) -> None:
        assert not isinstance(models.draft, Refused)
        self.model: nn.Module = models.draft
        self.prompt_reader = self.model
        self.gamma = models.config.gamma
        self._vocab_size = models.draft_vocab
        self.held = 0
        self._snapshot: Snapshot | None = None
        self._settled = 0  # tokens that can't be taken back

    @classmethod
    def predict(cls, models: Models, prompt: int, tokens: int) -> Held:
        return Held(draft=tokens)

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        return draft_tokens(self._catch_up(text), self._feed, text, count, sampler)

    def accept(self, verified: Verified) -> None:
        self.keep(verified.length)
        self._snapshot = None

    def keep(self, length: int) -> None:
        """Cut the cache to the first `length` generated tokens. More can be taken back until `accept`."""
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
