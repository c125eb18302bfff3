"""Continuous batching: rows share a forward in each step, and join and leave at any step.

Each row keeps its own cache: its length costs no other row anything. In float32 its answer does not depend on the
other rows. In half precision rounding depends on the number of rows in a forward, and two tokens that are almost
equally likely can change places.

The next forward is queued before the tokens of this step are read. So after every step a row's cache holds its prompt
and exactly the tokens that steps have returned, including the last. Nothing is rolled back, which recurrent states
could not be. A row with a grammar needs its token on the host before the next can be chosen: the token is read, and the
mask made, while the forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...adapters.registry import adapter_for, architecture_of
from ...adapters.rotation import adjust_offsets
from ...arrays import Bools
from ...cache.merging import can_share, gather, scatter
from ...choosing.constraints import GrammarState, stack_masks
from ...choosing.sampling import LogitsProcessor, Sampler, choose, greedy, token_event
from ...distributed.ranks import Ranks
from ...errors import InvalidRequestError
from ...events import TokenEvent


@dataclass(frozen=True)
class DecodeRow:
    """A prefilled sequence. The batch owns its cache until the row is removed.

    Attributes:
        uid: identifies the row.
        cache: one entry per layer; holds the prompt.
        logits: of the last prompt token, (1, V).
        processors: functions of (generated tokens so far, logits (1, V)).
        logprobs: None, or how many alternatives to report per token.
        shift: positions minus slots for caches that can't carry it; 0 for positioned ones.
        grammar: masks forbidden tokens; the batch passes it every token.
        generated: tokens of the answer that the cache and the grammar hold already.
    """

    uid: int
    cache: list[Any]
    logits: mx.array
    sampler: Sampler
    processors: Seq[LogitsProcessor] = ()
    logprobs: int | None = None
    shift: int = 0
    grammar: GrammarState | None = None
    generated: tuple[int, ...] = ()


class Removed(NamedTuple):
    """A row that was taken out. `cache` holds the prompt and `tokens`, all that steps returned."""

    cache: list[Any]
    tokens: tuple[int, ...]


class RowFailed(Exception):  # noqa: N818 - an outcome of one row, like a cancellation
    """A row's processor or sampler raised (see the cause). Remove the row and go on: no other row is affected."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"row {uid} can't choose its next token")
        self.uid = uid


class _Row:
    """State of one row on the host, and its own cache."""

    def __init__(self, spec: DecodeRow) -> None:
        self.uid = spec.uid
        self.cache = spec.cache
        self.sampler = spec.sampler
        self.processors = spec.processors
        self.logprobs = spec.logprobs
        self.shift = spec.shift
        self.grammar = spec.grammar
        self.tokens = list(spec.generated)
        self.first_reported = False  # the next token is known already
        self.history: mx.array | None = None
        if spec.processors and spec.generated:
            self.history = mx.array(spec.generated)
        self.failure: Exception | None = None

    @property
    def greedy(self) -> bool:
        return self.sampler is greedy and not self.processors

    def choose(self, logits: mx.array, allowed: mx.array | None) -> tuple[mx.array, mx.array]:
        return choose(logits, self.history, self.sampler, self.processors, allowed)

    def follow(self, token: int, size: int) -> Bools | None:
        """Return the mask of the grammar after `token`; None allows everything."""
        grammar = self.grammar
        if grammar is None or self.failure is not None:
            return None
        try:
            grammar.accept(token)
            return grammar.mask(size)
        except InvalidRequestError as error:
            self.failure = error
            return None


class _Choice(NamedTuple):
    """The next tokens of a group's rows."""

    tokens: mx.array  # (B,)
    scores: mx.array  # (B, V)


@dataclass(eq=False)
class _Group:
    """Rows that share a forward.

    Attributes:
        cache: one entry per layer, of all rows. That of a single row is its own.
    """

    model: nn.Module
    ranks: Ranks | None
    rows: list[_Row]
    cache: list[Any]
    next: _Choice

    @classmethod
    def of(cls, model: nn.Module, spec: DecodeRow, ranks: Ranks | None) -> _Group:
        """Return a group of a new row, whose first token is chosen and queued."""
        row = _Row(spec)
        first = None if spec.grammar is None else spec.grammar.mask(spec.logits.shape[-1])
        choice = _Choice(*row.choose(spec.logits, None if first is None else mx.array(first)[None]))
        group = cls(model, ranks, [row], row.cache, choice)
        group._follow(choice)
        return group

    def advance(self) -> _Choice:
        """Feed every row's token and queue the next choice; return the tokens fed."""
        fed = self.next
        with adjust_offsets([row.shift for row in self.rows]):
            logits = self.model(fed.tokens[:, None], cache=self.cache)[:, -1, :]
        self._follow(self._choose(logits, fed.tokens, self._grammar_masks(logits, fed.tokens)))
        return fed

    def _follow(self, chosen: _Choice) -> None:
        """Queue the tokens that the next forward takes."""
        self.next = chosen._replace(tokens=self._broadcast(chosen.tokens))
        reported = any(row.logprobs is not None for row in self.rows)
        mx.async_eval(self.next.tokens, *([self.next.scores] if reported else []))  # type: ignore[no-untyped-call]

    def _broadcast(self, tokens: mx.array) -> mx.array:
        """Return rank 0's choice: machines may round differently."""
        return tokens if self.ranks is None else self.ranks.broadcast_tokens(tokens)

    def events(self, fed: _Choice) -> list[tuple[int, TokenEvent]]:
        events = []
        for index, (row, token) in enumerate(zip(self.rows, np.array(fed.tokens).tolist(), strict=True)):
            row.tokens.append(token)
            if not row.first_reported:
                events.append((row.uid, self._event(index, token, fed)))
            row.first_reported = False
        return events

    def first_event(self) -> TokenEvent:
        """Return the first event of a group of one row, before its first step."""
        self.rows[0].first_reported = True
        return self._event(0, int(np.array(self.next.tokens)[0]), self.next)

    def _event(self, index: int, token: int, choice: _Choice) -> TokenEvent:
        return token_event(token, choice.scores[index : index + 1], self.rows[index].logprobs)

    def absorb(self, others: Seq[_Group]) -> None:
        """Take the rows of other groups in."""
        groups = (self, *others)
        self._set_rows([row for group in groups for row in group.rows])
        self.next = _Choice(
            *(mx.concatenate(list(part)) for part in zip(*(group.next for group in groups), strict=True))
        )

    def take(self, index: int) -> _Row:
        """Take a row out."""
        row = self.rows[index]
        keep = [other for other in range(len(self.rows)) if other != index]
        self._set_rows([self.rows[other] for other in keep])
        if keep:
            self.next = _Choice(*(part[mx.array(keep)] for part in self.next))
        # Queued now: arrays that are still to be cut out of the batch keep all of it alive.
        mx.async_eval([part.state for part in row.cache], self.next.tokens)  # type: ignore[no-untyped-call]
        return row

    def _set_rows(self, rows: list[_Row]) -> None:
        if len(self.rows) > 1:
            scatter(self.cache, [row.cache for row in self.rows])
        self.rows = rows
        self.cache = gather([row.cache for row in rows]) if len(rows) > 1 else rows[0].cache if rows else []

    def _grammar_masks(self, logits: mx.array, fed: mx.array) -> mx.array | None:
        """Return the grammars' masks after the fed tokens, (B, V). Runs beside the forward."""
        if all(row.grammar is None for row in self.rows):
            return None
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        size = logits.shape[-1]
        masks = [row.follow(token, size) for row, token in zip(self.rows, np.array(fed).tolist(), strict=True)]
        return None if all(mask is None for mask in masks) else mx.array(stack_masks(masks, size))

    def _choose(self, logits: mx.array, fed: mx.array, allowed: mx.array | None) -> _Choice:
        if all(row.greedy for row in self.rows):
            return _Choice(*choose(logits, None, greedy, (), allowed))
        one = [slice(i, i + 1) for i in range(len(self.rows))]
        chosen = [
            self._choose_one(i, logits[at], fed[at], None if allowed is None else allowed[at])
            for i, at in enumerate(one)
        ]
        return _Choice(*(mx.concatenate(list(part)) for part in zip(*chosen, strict=True)))

    def _choose_one(
        self, index: int, logits: mx.array, fed: mx.array, allowed: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        row = self.rows[index]
        if row.processors:
            row.history = fed if row.history is None else mx.concatenate([row.history, fed])
        try:
            return row.choose(logits, allowed)
        except Exception as error:  # noqa: BLE001 - one row's processor must not end the others
            row.failure = error
            return choose(logits, None, greedy, ())


class DecodeBatch:
    """Decodes rows of any caches, samplers and lengths.

    Rows share a forward. Those whose caches can't be read beside others, and all rows of an architecture that was not
    verified in batches, take a forward each. If a step raises anything but `RowFailed`, all rows' caches are unusable.
    """

    def __init__(self, model: nn.Module, ranks: Ranks | None = None) -> None:
        """Args:
        ranks: over which the model is spread, if it is.
        """
        self._model = model
        self._ranks = ranks
        self._batched = adapter_for(architecture_of(model)).batch_refusal is None
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    @property
    def uids(self) -> list[int]:
        return [row.uid for group in self._groups for row in group.rows]

    @property
    def caches(self) -> list[list[Any]]:
        """Return one cache for each forward of a step."""
        return [group.cache for group in self._groups]

    def add(self, row: DecodeRow) -> None:
        """Add a row from the next step on. Its first token comes from its logits, without a forward."""
        self._groups.append(_Group.of(self._model, row, self._ranks))

    def first_token(self) -> TokenEvent:
        """Return the newest row's first token now, before its first step, which takes time to set up.

        The step then does not return that token.
        """
        return self._groups[-1].first_event()

    def remove(self, uid: int) -> Removed:
        """Take a row out between two steps.

        Raises:
            KeyError: there is no such row.
        """
        for group in self._groups:
            for index, row in enumerate(group.rows):
                if row.uid == uid:
                    group.take(index)
                    self._groups = [group for group in self._groups if group.rows]
                    return Removed(row.cache, tuple(row.tokens))
        raise KeyError(uid)

    def step(self) -> list[tuple[int, TokenEvent]]:
        """Return one token of every row, by uid. The caller removes rows that have ended.

        Raises:
            RowFailed: before anything was done; the row that it names has to be removed.
        """
        for row in (row for group in self._groups for row in group.rows):
            if row.failure is not None:
                raise RowFailed(row.uid) from row.failure
        self._join()
        fed = [group.advance() for group in self._groups]
        return [event for group, choice in zip(self._groups, fed, strict=True) for event in group.events(choice)]

    def _join(self) -> None:
        """Merge the groups whose rows can share a forward."""
        if not self._batched or len(self._groups) == 1:
            return
        shared = [group for group in self._groups if can_share(group.rows[0].cache)]
        if len(shared) > 1:
            shared[0].absorb(shared[1:])
            self._groups = [group for group in self._groups if group not in shared[1:]]
