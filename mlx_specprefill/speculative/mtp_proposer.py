"""The target's multi-token prediction head as a proposer. Its KV cache follows the text like a layer's.

Entry p needs the target's hidden state of token p, and token p + 1. After a sparse prefill it exists if token p + 1 was
kept as well, at the original position. Entries that the head added while drafting are trimmed, and added again with the
target's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..adapters.mtp import MTPHead, record_hidden
from ..cache.positioned import PositionedKVCache, place
from ..request import TokenIds
from .proposer import Proposal, Proposer, Verified, draft_tokens
from .verification import TokenSampler

Indices = npt.NDArray[np.int32]


class PromptReader:
    """Reads a prompt with the head while the target does.

    Args:
        fed: prompt indices that the target will read, ascending up to the last one.

    Attributes:
        cache: the head's entries.
        hidden: the target's hidden states from the last prompt token on, (1, R, D), after the prefill.
    """

    def __init__(self, head: MTPHead, prompt: Sequence[int] | TokenIds, fed: Indices) -> None:
        self.head = head
        self.cache = PositionedKVCache()
        self.length = len(prompt)
        self.hidden: mx.array | None = None
        self._tokens = np.asarray(prompt, dtype=np.int32)
        self._fed = fed
        self._done = 0

    def read(self, forwards: Sequence[mx.array]) -> None:
        """Read the hidden states (1, L, D) of one or more target forwards."""
        for hidden in forwards:
            self._read(hidden)
        mx.eval(self.hidden, [] if self.cache.empty() else self.cache.state)

    def with_target(self, model: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """Return the target as a model whose forwards are read along."""

        def forward(tokens: mx.array, cache: Any) -> mx.array:
            with record_hidden() as forwards:
                output = model(tokens, cache=cache)
            self.read(forwards)
            return output

        return forward

    def _read(self, hidden: mx.array) -> None:
        first, end = self._done, self._done + hidden.shape[1]
        if self.hidden is not None:  # of the previous token, whose successor is known now
            first, hidden = first - 1, mx.concatenate([self.hidden, hidden], axis=1)
        at = self._fed[first:end]  # ends with the prompt; later tokens are ignored
        self._done = first + at.size
        self.hidden = hidden[:, at.size - 1 :]
        followed = np.flatnonzero(np.diff(at) == 1)
        if followed.size:
            positions = at[followed]
            place([self.cache], positions)
            following = mx.array(self._tokens[positions + 1])[None]
            self.head(hidden[:, mx.array(followed)], following, self.cache)


class MTPProposer(Proposer):
    """Proposals of the head: the first from the target's hidden state, further ones from the head's own output."""

    def __init__(self, reader: PromptReader, gamma: int) -> None:
        assert reader.hidden is not None
        self.gamma = gamma
        self.head = reader.head
        self.cache = reader.cache
        self._hidden = reader.hidden  # of the tokens before the unread ones
        self._next = reader.length - 1  # position of its next entry
        self._settled = self._next  # the same without entries from its own drafts
        self._read = 0  # tokens of the generated text that it has read

    def recording(self) -> AbstractContextManager[list[mx.array]]:
        return record_hidden()

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        new = text[self._read :]
        logits = self._feed(self._hidden[:, : len(new)], new)
        self._read, self._settled = len(text), self._next
        return draft_tokens(logits, lambda token: self._feed(self._out, token), text, count, sampler)

    def settle(self, verified: Verified) -> None:
        self.cache.trim(self._next - self._settled)
        self._next = self._settled
        (self._hidden,) = verified.recorded

    def _feed(self, hidden: mx.array, following: Sequence[int]) -> mx.array:
        """Add entries; return the logits (1, V) of the last one."""
        count = len(following)
        place([self.cache], np.arange(self._next, self._next + count, dtype=np.int32))
        self._next += count
        self._out = self.head(hidden, mx.array([list(following)]), self.cache)[:, -1:]
        return self.head.logits(self._out)[0]
