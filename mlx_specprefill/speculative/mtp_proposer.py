"""The target's multi-token prediction head as a proposer. Its KV cache follows the text like a layer's.

Entry p needs the target's hidden state of token p, and token p + 1. After a sparse prefill it exists if token p + 1 was
kept as well, at the original position. Entries that the head added while drafting are trimmed, and added again with the
target's hidden states.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from ..adapters.mtp import MTPHead, load_mtp_head
from ..cache.positioned import PositionedKVCache, place
from ..config import DtypeName
from ..errors import LoadError, Refused
from ..loading.one_model import cast_model, dtype_name, to_float16
from ..request import TokenIds
from .acceptance import TokenSampler
from .proposer import Held, Model, Models, Proposal, Proposer, Verified, draft_tokens

log = logging.getLogger(__name__)
_NAME = "mtp"
_NO_HEAD = Refused("it was not loaded from a checkpoint")


def _head_of(models: Models) -> MTPHead | Refused:
    head = models.own_parts.get(_NAME, _NO_HEAD)
    assert isinstance(head, (MTPHead, Refused))
    return head


class MTPProposer(Proposer):
    """Proposals of the head: the first from the target's hidden state, further ones from the head's own output.

    Attributes:
        entries: the head's cache.
    """

    def __init__(self, models: Models, prompt: TokenIds) -> None:
        head = _head_of(models)
        assert not isinstance(head, Refused)
        self.head = head
        self.gamma = models.config.gamma
        self.entries = PositionedKVCache()
        self._prompt = np.asarray(prompt, dtype=np.int32)
        self._fed = self._prompt[:0]  # prompt indices that the target reads
        self._done = 0  # of these, read
        self._hidden: mx.array | None = None  # (1, R, D), of the tokens before the unread ones
        self._next = self._prompt.size - 1  # position of the next entry behind the prompt
        self._settled = self._next  # the same without entries from its own drafts
        self._read = 0  # tokens of the generated text that it has read

    @classmethod
    def load(cls, target: nn.Module, folder: Path, dtype: DtypeName) -> MTPHead | Refused:
        """Load the head from the target's files, which mlx-lm skips, if there is one."""
        try:
            head = load_mtp_head(target, folder)
        except LoadError as error:
            return Refused(str(error))
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            log.warning("%s: its MTP head can't be read: %s", folder, error)
            return Refused(f"its MTP head can't be read: {error}")
        cast_model(head.layers, dtype)
        if dtype_name(target) == "float16":
            to_float16(head.layers)
        mx.eval(head.layers)
        return head

    @classmethod
    def refusal(cls, models: Models) -> str | None:
        head = _head_of(models)
        return head.reason if isinstance(head, Refused) else None

    @classmethod
    def predict(cls, models: Models, prompt: int, tokens: int) -> Held:
        head = _head_of(models)
        return Held() if isinstance(head, Refused) else Held(nbytes=head.entry_bytes * (tokens + KVCache.step))

    @property
    def caches(self) -> Sequence[Any]:
        return [self.entries]

    def read_along(self, target: Model, fed: TokenIds) -> Model:
        self._fed = fed

        def forward(tokens: mx.array, cache: Any) -> mx.array:
            logits, hidden = self.head.run_target(tokens, cache)
            self._read_prompt(hidden)
            return logits

        return forward

    def record(self, target: Model) -> Model:
        def forward(tokens: mx.array, cache: Any) -> mx.array:
            logits, self._recorded = self.head.run_target(tokens, cache)
            return logits

        return forward

    def propose(self, text: Sequence[int], count: int, sampler: TokenSampler) -> Proposal:
        assert self._hidden is not None
        new = text[self._read :]
        logits = self._feed(self._hidden[:, : len(new)], new)
        self._read, self._settled = len(text), self._next
        return draft_tokens(logits, lambda token: self._feed(self._out, token), text, count, sampler)

    def accept(self, verified: Verified) -> None:
        self.entries.trim(self._next - self._settled)
        self._next = self._settled
        self._hidden = self._recorded

    def _read_prompt(self, hidden: mx.array) -> None:
        """Add the entries of one of the target's forwards, from its hidden states (1, L, D)."""
        first, end = self._done, self._done + hidden.shape[1]
        if self._hidden is not None:  # of the previous token, whose successor is known now
            first, hidden = first - 1, mx.concatenate([self._hidden, hidden], axis=1)
        at = self._fed[first:end]  # ends with the prompt; later tokens are ignored
        self._done = first + at.size
        self._hidden = hidden[:, at.size - 1 :]
        followed = np.flatnonzero(np.diff(at) == 1)
        if followed.size:
            positions = at[followed]
            place([self.entries], positions)
            following = mx.array(self._prompt[positions + 1])[None]
            self.head(hidden[:, mx.array(followed)], following, self.entries)
        mx.eval(self._hidden, [] if self.entries.empty() else self.entries.state)

    def _feed(self, hidden: mx.array, following: Sequence[int]) -> mx.array:
        """Add entries; return the logits (1, V) of the last one."""
        count = len(following)
        place([self.entries], np.arange(self._next, self._next + count, dtype=np.int32))
        self._next += count
        self._out = self.head(hidden, mx.array([list(following)]), self.entries)[:, -1:]
        return self.head.logits(self._out)[0]
