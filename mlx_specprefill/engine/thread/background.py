"""Idle time: which answered turn is read further, by the draft or the target, and when a turn is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...calibration.fitting_estimates import FIT_TOKENS
from ...errors import RequestCancelled
from ...events import Progress, PromptLogprobs
from ...request import GenerationRequest, SpecPrefillOptions, TokenIds, concat_tokens
from ...verdict import Verdict
from ..memory.reservations import Memory
from ..reading.densify import densify
from ..reading.prefill import Prefiller
from ..reading.verdicts import Guide, Quantize, verify
from ..requests.active_request import ActiveRequest
from ..requests.job import Job, RequestHandle

log = logging.getLogger(__name__)
_LIMIT = 8  # turns


@dataclass(frozen=True, slots=True, eq=False)
class IdleTurn:
    """A turn after which something is left to read.

    Attributes:
        request: the answered one; `answer`: the tokens that came back.
        handle: of the request; says whether the conversation is expected to go on.
        dense: the target saw it in part, and is to read the rest.
        drafts: the draft is to read it first.
    """

    request: GenerationRequest
    answer: tuple[int, ...]
    handle: RequestHandle
    dense: bool = True
    drafts: bool = False

    @property
    def tokens(self) -> TokenIds:
        return concat_tokens(self.request.prompt, self.answer)

    @property
    def is_to_verify(self) -> bool:
        return self.dense and bool(self.answer) and self.request.specprefill.verify

    def follows(self, other: IdleTurn) -> bool:
        """Return whether this is the same turn, or a later one of the same conversation."""
        mine, others = self.request, other.request
        return mine.label == others.label and np.array_equal(mine.prompt[: len(others.prompt)], others.prompt)

    def tell(self, verdict: Verdict) -> None:
        """Report the verdict, if one is wanted."""
        if self.is_to_verify:
            self.handle.on_verdict(verdict)


class BackgroundQueue:
    """Turns whose answers called a tool come first, newest first among equals; the last in order go when it is full.

    A turn stays in the queue until it is removed, also while it is being made dense.
    """

    def __init__(self, is_expecting: Callable[[IdleTurn], bool]) -> None:
        """Args:
        is_expecting: returns whether a turn's answer called a tool, so that the next turn is certain to come.
        """
        self.is_expecting = is_expecting
        self._turns: list[IdleTurn] = []  # newest first

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn: IdleTurn) -> bool:
        return turn in self._turns

    def add(self, turn: IdleTurn) -> list[IdleTurn]:
        """Add the newest turn, which replaces earlier turns of its conversation. Return the turns that have to go."""
        gone = [old for old in self._turns if turn.follows(old)]
        self._turns = [turn, *(old for old in self._turns if old not in gone)]
        if len(self._turns) > _LIMIT:
            gone.append(sorted(self._turns, key=self._order)[-1])
            self.discard(gone[-1])
        return gone

    def all(self) -> tuple[IdleTurn, ...]:
        return tuple(self._turns)

    def first(self) -> IdleTurn | None:
        return min(self._turns, key=self._order, default=None)

    def discard(self, turn: IdleTurn) -> None:
        """Take a turn out that is done or given up. A turn that was replaced is not in the queue."""
        if turn in self._turns:
            self._turns.remove(turn)

    def replace(self, turn: IdleTurn, other: IdleTurn) -> None:
        """Put another turn in the place of this one, unless that was replaced."""
        self._turns = [other if old is turn else old for old in self._turns]

    def _order(self, turn: IdleTurn) -> bool:
        return not self.is_expecting(turn)


class BackgroundPrefill:
    """Reads what is left of one turn after another, the first of the queue at any time.

    It reserves memory as a request does, but evicts nothing. A turn without room is given up.

    Attributes:
        turns: still to be read.
        count, tokens: turns that were made dense, and their tokens.
    """

    def __init__(self, prefiller: Prefiller, memory: Memory, guide: Guide, quantize: Quantize) -> None:
        """Args:
        guide: makes a request's grammar.
        quantize: `Rows.quantize`.
        """
        self._prefiller = prefiller
        self._memory = memory
        self._guide = guide
        self._quantize = quantize
        self._now: tuple[IdleTurn, RequestHandle] | None = None
        self._fit: RequestHandle | None = None  # of the fit's job, while it runs
        self._answered = False
        self.turns = BackgroundQueue(self._is_expecting)
        self.count = self.tokens = 0
        pair, policy = prefiller.pair, prefiller.config.policy
        self._densifies = policy.densify
        # On several ranks, one alone may have the draft.
        self._drafts = pair.draft is not None and policy.densify and policy.enabled and pair.ranks is None

    @property
    def has_work(self) -> bool:
        """Return whether something is left to do in idle time."""
        return bool(self.turns) or (self._answered and self._prefiller.estimating.is_to_fit)

    @property
    def drafts_first(self) -> bool:
        """Return whether the draft reads next."""
        turn = self.turns.first() if self._drafts else None
        return turn is not None and turn.drafts

    @property
    def is_drafting(self) -> bool:
        """Return whether the draft reads now, or has been interrupted."""
        return self._now is not None and self._now[0].drafts

    def follow(self, active: ActiveRequest, handle: RequestHandle) -> None:
        """Queue a turn that was answered, if something is left to read."""
        request, self._answered = active.request, True
        dense = self._densifies and active.is_sparse and (active.is_to_verify or self._has_room(active))
        drafts = self._drafts and request.specprefill.enabled is not False
        if not (dense or drafts):
            return
        turn = IdleTurn(request, tuple(active.decoded.tokens), handle, dense, drafts)
        if self._is_forgotten(turn):
            self._give_up(turn)
            return
        for old in self.turns.add(turn):
            if self._now is None or self._now[0] is not old:
                old.tell(Verdict())

    def _has_room(self, active: ActiveRequest) -> bool:
        """Return whether the dense prefix of a turn can be kept beside what the turn left: else the next turn would
        find less than without it.
        """
        request, tokens = active.request, concat_tokens(active.request.prompt, active.decoded.tokens)
        states = 1 + len(self._prefiller.checkpoints(replace(request, prompt=tokens)))
        session = sum(record.nbytes for record in self._prefiller.caches.session(tokens, request.label))
        return self._memory.has_room_for_prefix(tokens.size, states, session)

    def _is_expecting(self, turn: IdleTurn) -> bool:
        return turn.handle.expecting

    def _is_forgotten(self, turn: IdleTurn) -> bool:
        return not self._prefiller.caches.keeps(turn.request)

    def forget(self) -> None:
        """Give up the turns of prompts that are not to be kept any more."""
        for turn in self.turns.all():
            if self._is_forgotten(turn):
                self._give_up(turn)

    def close(self) -> None:
        """Report that the turns in the queue will not be verified."""
        while (turn := self.turns.first()) is not None:
            self._give_up(turn)

    def _give_up(self, turn: IdleTurn) -> None:
        self.turns.discard(turn)
        turn.tell(Verdict())

    def job(self, uid: int) -> Job | None:
        """Return the job of the first turn, or else of the estimates' fit; None while another runs.

        The other is cancelled if outranked.
        """
        turn = self.turns.first()
        if turn is None:
            return self._fit_job(uid)
        if self._fit is not None:
            self._fit.cancel()  # it goes on behind the turn
            return None
        if self._now is not None:
            now = self._now[0]
            if self._is_expecting(turn) and not self._is_expecting(now):
                self._now[1].cancel()  # its finished steps stay in the cache, and its turn in the queue
            return None
        need, on_end = self._memory.need_idle(len(turn.tokens), not turn.drafts), partial(self._finish, turn)
        job = Job(uid, self._steps(turn), need, on_end=on_end, background=True, rereads=turn.request)
        if not self._memory.reserve_free(uid, job.need):
            log.info("no memory to read %d tokens in idle time", len(turn.tokens))
            self._give_up(turn)
            return None
        self._now = turn, job.handle
        return job

    def _fit_job(self, uid: int) -> Job | None:
        """Return the job that goes on with the fit; None while it runs, or where it has no memory."""
        estimating = self._prefiller.estimating
        if self._fit is not None or not self.has_work or (sums := estimating.begin_fit()) == 0:
            return None
        job = Job(
            uid, estimating.fit(), self._memory.need_idle(FIT_TOKENS, True), on_end=self._end_fit, background=True
        )
        if not self._memory.reserve_fit(sums) or not self._memory.reserve_free(uid, job.need):
            log.info("no memory to fit estimates in idle time")
            self.drop_fit()
            self._answered = False  # until the next answer
            return None
        self._fit = job.handle
        return job

    def _end_fit(self, result: Exception | None) -> None:
        self._fit = None
        if not isinstance(result, RequestCancelled):
            if isinstance(result, Exception):
                log.error("the estimates' fit failed", exc_info=result)
                self._answered = False
            self.drop_fit()

    def drop_fit(self) -> None:
        """Give up what the fit has added up, and its memory."""
        self._prefiller.estimating.drop_fit()
        self._memory.release_fit()

    def _steps(self, turn: IdleTurn) -> Generator[Progress | PromptLogprobs, None, Verdict | None]:
        """Read what is left of the turn. Return the verdict if one is wanted."""
        request = replace(turn.request, specprefill=SpecPrefillOptions(), prompt_logprobs=None)
        if not turn.drafts and turn.is_to_verify:
            return (yield from verify(self._prefiller, request, turn.answer, self._guide, self._quantize))
        text = replace(request, prompt=turn.tokens)
        if turn.drafts:
            yield from self._prefiller.scorer.catch_up(text)
        else:
            yield from densify(self._prefiller, text)
        return None

    def _finish(self, turn: IdleTurn, result: Verdict | Exception | None) -> None:
        if self._now is not None and self._now[0] is turn:
            self._now = None
        if isinstance(result, RequestCancelled) or (turn.drafts and turn.dense):
            if turn not in self.turns:
                turn.tell(Verdict())
            elif not isinstance(result, RequestCancelled):
                self.turns.replace(turn, replace(turn, drafts=False))
            return
        # Another thread that sees no turn finds this one counted; if it sees the count, then its tokens, too.
        if turn.dense and not isinstance(result, Exception):
            self.tokens += len(turn.tokens)
            self.count += 1
        self.turns.discard(turn)
        turn.tell(result if isinstance(result, Verdict) else Verdict())
