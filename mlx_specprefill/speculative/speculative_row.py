"""Decodes a row with proposals: several tokens per target forward, with the target's distribution.

Invariant between rounds: the target's cache holds the prompt and all returned tokens. After a proposal one more token
is chosen and not fed. The next round feeds it together with a proposal, keeps the tokens that the target accepts, and
chooses the next one. Without a proposal, the next forward is queued before this one's token is read, as in a batch of
plain rows, so an idle proposer costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..choosing.sampling import log_softmax, token_event
from ..events import TokenEvent
from .acceptance import TokenSampler, draw, verify
from .proposer import AcceptanceCounts, Proposal, Proposer, Verified
from .rollback import Rollback


class SpeculativeRow:
    """One sequence that decodes alone, beside other rows.

    Args:
        cache: the target's, prefilled; the row owns it until it ends.
        logits: of the last prompt token, (1, V).
        sampler: its stops end the answer.
        logprobs: None, or how many alternatives to report per token.
        shift: positions minus slots for caches that can't carry it.

    Attributes:
        tokens: those returned so far.
        steps: target forwards since the prefill.
        acceptance: counts of the proposed tokens.
        first: event of the first token, which is known before the first step. Steps do not return it again.
        proposing: the proposer is running: if it raises, the row itself is intact.
    """

    def __init__(
        self,
        model: Callable[..., mx.array],
        cache: list[Any],
        logits: mx.array,
        proposer: Proposer,
        sampler: TokenSampler,
        max_tokens: int,
        *,
        logprobs: int | None = None,
        shift: int = 0,
    ) -> None:
        self.model = proposer.record(model)
        self.cache = cache
        self.proposer = proposer
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.steps = 0
        self.acceptance = AcceptanceCounts()
        self.logits = logits[:1]
        self._sampler = sampler
        self._logprobs = logprobs
        self._shift = shift
        self._next: int | None = None  # None: `logits` decide
        self._verified: Verified | None = None
        self.proposing = False
        self.first = self._event(self._choose_next(), self.logits)

    @property
    def ended(self) -> bool:
        stopped = bool(self.tokens) and self.tokens[-1] in self._sampler.stops
        return stopped or len(self.tokens) >= self.max_tokens

    def step(self) -> list[TokenEvent]:
        """Run one target forward, after the proposer's; return the tokens that it adds.

        Afterwards the cache holds exactly the prompt and `tokens`.
        """
        if self._next is None and self._rests():
            return self._feed_unread()
        first = self._choose_next()
        text = [*self.tokens, first]
        room = self.max_tokens - len(text)
        proposal = Proposal()
        if room > 0 and first not in self._sampler.stops:
            proposal = self._propose(text, min(self.proposer.gamma, room))
        tokens, distributions = proposal.tokens[:room], proposal.distributions[:room]
        fed = [first, *tokens]
        rollback = Rollback(self.cache, self._shift)
        rows = self._forward(rollback, mx.array([fed]))
        if not tokens:
            self._next = None
            self._verified = Verified(len(text))
            return self._commit(fed, rows)
        verdict = verify(self._sampler.distributions(rows, text, tokens), distributions, tokens, self._sampler.rng)
        self.acceptance.add(len(tokens), verdict.accepted)
        kept = self._cut(fed[: 1 + verdict.accepted])
        rollback.keep(kept)
        self._next = verdict.token
        events = self._commit(fed[:kept], rows[:kept])
        self._verified = Verified(len(self.tokens), len(tokens), verdict.accepted, kept - 1)
        return events

    def leave(self) -> list[TokenEvent]:
        """Feed the chosen token. Then `logits` decide the next one."""
        if self.ended or self._next is None:
            return []
        rows = self._forward(Rollback(self.cache, self._shift), mx.array([[self._next]]))
        return self._commit([self._next], rows)

    def _rests(self) -> bool:
        """Return whether the next token can be fed unread: no grammar needs it, and nothing is proposed."""
        self.proposing = True
        rests = self._sampler.grammar is None and self.proposer.idle(self.tokens)
        self.proposing = False
        return rests

    def _feed_unread(self) -> list[TokenEvent]:
        """Queue the forward of the token that `logits` choose, then read it."""
        token = self._sampler.choose(self.logits, self.tokens)
        # Evaluated alone: arrays that are queued together can only be read once all are done.
        mx.async_eval(token)  # type: ignore[no-untyped-call]
        rows = self._forward(Rollback(self.cache, self._shift), token[None])
        events = self._commit([int(np.array(token)[0])], rows)
        self._verified = Verified(len(self.tokens))
        return events

    def _choose_next(self) -> int:
        """Return the token to feed next."""
        if self._next is None:
            (distribution,) = self._sampler.distributions(self.logits, self.tokens)
            self._next = draw(distribution, self._sampler.rng)
        return self._next

    def _propose(self, text: list[int], count: int) -> Proposal:
        self.proposing = True
        if self._verified is not None:
            self.proposer.accept(self._verified)
        proposal = self.proposer.propose(text, count, self._sampler)
        self.proposing = False
        return proposal

    def _cut(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that still belong to the answer."""
        stop = next((i + 1 for i, token in enumerate(tokens) if token in self._sampler.stops), len(tokens))
        return min(stop, self.max_tokens - len(self.tokens))

    def _forward(self, rollback: Rollback, fed: mx.array) -> mx.array:
        """Queue the forward of `fed` (1, R); return logits (R, V)."""
        self.steps += 1
        rows = rollback.forward(self.model, fed)
        mx.async_eval(rows)  # type: ignore[no-untyped-call]
        return rows

    def _commit(self, tokens: list[int], rows: mx.array) -> list[TokenEvent]:
        """Append tokens whose forward gave the logits `rows` (R, V) to the answer."""
        if not tokens:
            return []
        deciding = mx.concatenate([self.logits, rows[:-1]])
        self.logits = rows[-1:]
        self.tokens += tokens
        self._sampler.commit(tokens)
        events = [self._event(token, deciding[i : i + 1]) for i, token in enumerate(tokens)]
        return events[1:] if len(self.tokens) == len(tokens) else events

    def _event(self, token: int, logits: mx.array) -> TokenEvent:
        """Return the event of a token chosen from logits (1, V)."""
        return token_event(token, log_softmax(logits), self._logprobs)
