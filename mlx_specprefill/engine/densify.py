"""Idle time: the draft reads what it has not read of a conversation, and the target what it saw in part."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..errors import RequestCancelled
from ..request import (
    SHARED,
    CacheLabel,
    GenerationRequest,
    Progress,
    PromptLogprobs,
    PromptSpan,
    TokenIds,
    concat_tokens,
)
from .memory import Memory
from .prefill import Prefiller
from .sequence import Job, RequestHandle, Sequence, noop

__all__ = ["Densifier", "DensifyQueue", "IdleTurn"]

log = logging.getLogger(__name__)
_LIMIT = 8  # turns


@dataclass(frozen=True, slots=True, eq=False)
class IdleTurn:
    """A turn after which something is left to read.

    Attributes:
        prompt: its token ids, int32; `answer`: those that came back.
        handle: of its request; says whether the conversation is expected to go on.
        label: of its request; what becomes dense is found under no other.
        spans: of the prompt's messages.
        choice: `Sequence.choice`, by which its sparse prefix is found.
        pin_system_prefix: as of its request.
        dense: the target saw it in part, and is to read the rest.
        drafts: the draft is to read it first.
    """

    prompt: TokenIds
    answer: tuple[int, ...]
    handle: RequestHandle
    label: CacheLabel = SHARED
    spans: tuple[PromptSpan, ...] = ()
    choice: str | None = None
    pin_system_prefix: bool = False
    dense: bool = True
    drafts: bool = False

    @property
    def tokens(self) -> TokenIds:
        return concat_tokens(self.prompt, self.answer)

    def follows(self, other: IdleTurn) -> bool:
        """Return whether this is the same turn, or a later one of the same conversation."""
        return self.label == other.label and np.array_equal(self.prompt[: len(other.prompt)], other.prompt)


class DensifyQueue:
    """Turns whose answers called a tool come first, newest first among equals; the last in order go when it is full.

    A turn stays in the queue until it is removed, also while it is being made dense.
    """

    def __init__(self) -> None:
        self._turns: list[IdleTurn] = []  # newest first

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: IdleTurn) -> None:
        """The newest turn; it replaces earlier turns of its conversation."""
        others = [old for old in self._turns if not turn.follows(old)]
        self._turns = [turn, *others]
        if len(self._turns) > _LIMIT:
            self._turns.remove(self._in_order()[-1])

    def first(self) -> IdleTurn | None:
        return next(iter(self._in_order()), None)

    def discard(self, turn: IdleTurn) -> None:
        """Nothing more is to be done for it; no effect when it has been replaced."""
        if turn in self._turns:
            self._turns.remove(turn)

    def replace(self, turn: IdleTurn, other: IdleTurn) -> None:
        """Put another one in a turn's place; no effect when it has been replaced."""
        self._turns = [other if old is turn else old for old in self._turns]

    def _in_order(self) -> list[IdleTurn]:
        return sorted(self._turns, key=lambda turn: not self.is_expecting(turn))

    def is_expecting(self, turn: IdleTurn) -> bool:
        """Return whether the turn's answer called a tool, so that the next turn is certain to come."""
        return turn.handle.expecting


class Densifier:
    """Reads what is left of one turn after another, the first of the queue at any time.

    Memory is reserved for it as for a request, but nothing is evicted: a turn for which there is none is left as it is.

    Attributes:
        turns: still to be read.
        count, tokens: turns that were made dense, and their tokens.
    """

    _queue_type: type[DensifyQueue] = DensifyQueue

    def __init__(self, prefiller: Prefiller, memory: Memory) -> None:
        self._prefiller = prefiller
        self._memory = memory
        self._now: tuple[IdleTurn, RequestHandle] | None = None
        self.turns = self._queue_type()
        self.count = self.tokens = 0
        pair, policy = prefiller.pair, prefiller.config.policy
        self._densifies = policy.densify
        # A draft with another tokenizer has other tokens; on several ranks, one alone may have the draft.
        alone = pair.mapping is None and pair.ranks is None
        self._drafts = policy.densify and policy.enabled and pair.drafted and alone

    @property
    def drafts_first(self) -> bool:
        """Return whether the draft reads next."""
        if not self._drafts:
            return False
        turn = self.turns.first()
        return turn is not None and turn.drafts

    def follow(self, sequence: Sequence, handle: RequestHandle) -> None:
        """Queue a turn that was answered, if something is left to read."""
        request = sequence.request
        dense = self._densifies and sequence.kept is not None
        drafts = self._drafts and (request.pin_system_prefix or request.specprefill.enabled is not False)
        if dense or drafts:
            turn = IdleTurn(
                request.prompt,
                tuple(sequence.tokens),
                handle,
                request.label,
                request.spans,
                sequence.choice,
                request.pin_system_prefix,
                dense,
                drafts,
            )
            self.turns.add(turn)

    def job(self, uid: int) -> Job | None:
        """The next turn's job under this uid; None while there is one. One that is outranked gives way."""
        turn = self.turns.first()
        if turn is None:
            return None
        if self._now is not None:
            now = self._now[0]
            if self.turns.is_expecting(turn) and not self.turns.is_expecting(now):
                self._now[1].cancel()  # its finished slices stay in the cache, and its turn in the queue
            return None
        if not self._memory.reserve_free(uid, self._memory.need_idle(len(turn.tokens), not turn.drafts)):
            log.info("no memory to read %d tokens in idle time", len(turn.tokens))
            self.turns.discard(turn)
            return None
        self._now = turn, RequestHandle()
        return Job(uid, noop, self._now[1], self._slices(turn), on_end=partial(self._ended, turn), background=True)

    def _slices(self, turn: IdleTurn) -> Generator[Progress | PromptLogprobs, None, None]:
        request = GenerationRequest(
            turn.tokens, 1, spans=turn.spans, label=turn.label, pin_system_prefix=turn.pin_system_prefix
        )
        if turn.drafts:
            yield from self._prefiller.drafted(request)
        else:
            yield from self._prefiller.dense(request, turn.choice)

    def _ended(self, turn: IdleTurn, result: object) -> None:
        self._now = None
        if isinstance(result, RequestCancelled):
            return
        if turn.drafts and turn.dense:
            self.turns.replace(turn, replace(turn, drafts=False))
            return
        self.turns.discard(turn)
        if turn.dense and not isinstance(result, Exception):
            self.tokens += len(turn.tokens)
            self.count += 1  # last: who sees it in another thread finds the tokens too
