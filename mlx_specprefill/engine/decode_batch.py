"""Continuous batching: one forward per step for all rows, which join and leave at any step.

In float32 a row's answer is the one that it gets alone. In half precision rounding depends on the number of rows in a
forward, and two tokens that are almost equally likely can change places.

The next forward is queued before the tokens of this step are read, so after every step a row's cache holds its prompt
and exactly the tokens that steps have returned, the last one included: nothing is ever rolled back, which recurrent
states could not be. A row with a grammar needs its token on the host before the next can be chosen: it is read, and the
mask made, while the forward runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapters.registry import adapter_for, architecture_of
from ..adapters.rope import adjusted_offsets
from ..adapters.staged import StagedModel
from ..cache.rows import batch_key, extend_batch, extract_row, filter_batch, give_back, make_room, merge_rows
from ..constraints import GrammarState, Mask
from ..distributed.ranks import Ranks
from ..errors import InvalidRequestError
from ..request import TokenEvent
from ..sampling import LogitsProcessor, Sampler, choose, greedy, token_event

__all__ = ["DecodeBatch", "DecodeRow", "Removed", "RowFailed"]

# Of a step, for copies of the batch's caches when rows join or have left. All of them at once took half a second where
# a step takes 60 ms (a dozen rows, the longest 6 000 tokens, 2 cores).
COPYING_S = 0.02


@dataclass(frozen=True)
class DecodeRow:
    """A prefilled sequence. The batch owns its cache until the row is removed.

    Attributes:
        uid: names the row.
        cache: one entry per layer; holds the prompt.
        logits: of the last prompt token, (1, V).
        processors: functions of (generated tokens so far, logits (1, V)).
        logprobs: None, or how many alternatives to report per token.
        shift: positions minus slots for caches that can't carry it; 0 for positioned ones.
        grammar: masks what the row's grammar forbids; the batch tells it of every token.
        generated: tokens of the answer that the cache and the grammar hold already.
        staged: the caches of its first layers hold more tokens than the others.
    """

    uid: int
    cache: list[Any]
    logits: mx.array
    sampler: Sampler
    processors: Sequence[LogitsProcessor] = ()
    logprobs: int | None = None
    shift: int = 0
    grammar: GrammarState | None = None
    generated: tuple[int, ...] = ()
    staged: bool = False


@dataclass(frozen=True)
class Removed:
    """What is left of a row: `cache` holds the prompt and `tokens`, all that were returned by steps.

    Attributes:
        logits: of the last of them, (1, V).
    """

    cache: list[Any]
    tokens: tuple[int, ...]
    logits: mx.array


class RowFailed(Exception):  # noqa: N818 - an outcome of one row, like a cancellation
    """A row's processor or sampler raised (see the cause). No other row is affected; remove this one and go on."""

    def __init__(self, uid: int) -> None:
        super().__init__(f"row {uid} can't choose its next token")
        self.uid = uid


class _Row:
    """What one row remembers on the host; nothing of its cache and its logits, which soon lie in those of a batch."""

    def __init__(self, spec: DecodeRow) -> None:
        self.uid = spec.uid
        self.sampler = spec.sampler
        self.processors = spec.processors
        self.logprobs = spec.logprobs
        self.shift = spec.shift
        self.grammar = spec.grammar
        self.staged = spec.staged
        self.tokens = list(spec.generated)
        self.told = False  # that the token chosen next is known already
        self.history: mx.array | None = None
        if spec.processors and spec.generated:
            self.history = mx.array(spec.generated)
        self.failure: Exception | None = None

    @property
    def greedy(self) -> bool:
        return self.sampler is greedy and not self.processors

    def choose(self, logits: mx.array, allowed: mx.array | None) -> tuple[mx.array, mx.array]:
        return choose(logits, self.history, self.sampler, self.processors, allowed)

    def follow(self, token: int, size: int) -> Mask | None:
        """What its grammar allows after `token`; None: everything."""
        grammar = self.grammar
        if grammar is None or self.failure is not None:
            return None
        try:
            grammar.accept(token)
            return grammar.allowed(size)
        except InvalidRequestError as error:
            self.failure = error
            return None


class _Choice(NamedTuple):
    """What the rows of a group do next."""

    logits: mx.array  # (B, V)
    tokens: mx.array  # (B,)
    scores: mx.array  # (B, V)


class _Group:
    """Rows that share a forward. A single row keeps its own cache and costs what it costs alone."""

    def __init__(
        self, model: nn.Module, staged: StagedModel | None, spec: DecodeRow, key: Hashable | None, ranks: Ranks | None
    ) -> None:
        self._model = model
        self._staged = staged
        self._ranks = ranks
        self.key = key
        self.rows = [_Row(spec)]
        self.cache = spec.cache
        first = None if spec.grammar is None else spec.grammar.allowed(spec.logits.shape[-1])
        tokens, scores = self.rows[0].choose(spec.logits, _together([first]))
        self.next = _Choice(spec.logits, self._agreed(tokens), scores)
        self._queue()

    def advance(self) -> _Choice:
        """Feed every row's token and queue the choice that follows; what was fed."""
        fed = self.next
        with adjusted_offsets([row.shift for row in self.rows]):
            logits = self._forward(fed.tokens[:, None])[:, -1, :]
        chosen = self._choose(logits, fed.tokens, self._allowed(logits, fed.tokens))
        self.next = chosen._replace(tokens=self._agreed(chosen.tokens))
        self._queue()
        return fed

    def _agreed(self, tokens: mx.array) -> mx.array:
        """Return rank 0's choice: machines may round differently."""
        return tokens if self._ranks is None else self._ranks.tokens(tokens)

    def _forward(self, tokens: mx.array) -> mx.array:
        """In two parts only if a row needs it: masks are made once per part."""
        if any(row.staged for row in self.rows):
            assert self._staged is not None
            return self._staged(tokens, cache=self.cache)
        logits: mx.array = self._model(tokens, cache=self.cache)
        return logits

    def events(self, fed: _Choice) -> list[tuple[int, TokenEvent]]:
        events = []
        for index, (row, token) in enumerate(zip(self.rows, np.array(fed.tokens).tolist(), strict=True)):
            row.tokens.append(token)
            if not row.told:
                events.append((row.uid, self._event(index, token, fed)))
            row.told = False
        return events

    def first_event(self) -> TokenEvent:
        """Of a group of one row, before its first step."""
        self.rows[0].told = True
        return self._event(0, int(np.array(self.next.tokens)[0]), self.next)

    def _event(self, index: int, token: int, choice: _Choice) -> TokenEvent:
        return token_event(token, choice.scores[index : index + 1], self.rows[index].logprobs)

    def admit(self, others: Sequence[_Group], until: float) -> list[_Group]:
        """Take over those for which there is room, and make some for the rest, which go on by themselves meanwhile.

        Args:
            others: groups of one row, with the same key.
            until: by `time.monotonic`; copying goes on in the next step.

        Returns:
            The rest.
        """
        if len(self.rows) == 1:
            if others:
                self.absorb(others)
            return []
        joining, waiting = list[_Group](), list[_Group]()
        for other in others:
            fits = make_room(self.cache, len(joining) + len(waiting) + 1, other.cache, until)
            (joining if fits else waiting).append(other)
        if joining:
            self.absorb(joining)
        if not others:
            give_back(self.cache, until)
        return waiting

    def absorb(self, others: Sequence[_Group]) -> None:
        """Take over the rows of other groups with the same key."""
        newcomers = [other.cache for other in others]
        if len(self.rows) == 1:
            self.cache = merge_rows([self.cache, *newcomers])
        else:
            extend_batch(self.cache, merge_rows(newcomers))
        self.rows += [row for other in others for row in other.rows]
        self.next = _Choice(
            *(mx.concatenate(list(part)) for part in zip(self.next, *(g.next for g in others), strict=True))
        )

    def remove(self, index: int) -> Removed:
        row, keep = self.rows[index], _without(index, len(self.rows))
        logits = self.next.logits[index : index + 1]
        cache = self.cache
        if keep:
            cache = extract_row(self.cache, index)
            mx.eval([part.state for part in cache], logits)  # what still reads a cache keeps it from changing in place
            self._keep(keep)
        # Queued now, as arrays that wait to be cut out of the batch would keep all of it alive.
        mx.async_eval([part.state for part in (*cache, *self.cache)], logits, self.next.tokens)  # type: ignore[no-untyped-call]
        self.rows = [self.rows[other] for other in keep]
        return Removed(cache, tuple(row.tokens), logits)

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == 1:
            self.cache = extract_row(self.cache, rows[0])
        else:
            filter_batch(self.cache, rows)
        self.next = _Choice(*(part[mx.array(rows)] for part in self.next))

    def _allowed(self, logits: mx.array, fed: mx.array) -> mx.array | None:
        """What the rows' grammars allow after the fed tokens, (B, V); made while the forward runs."""
        if all(row.grammar is None for row in self.rows):
            return None
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        tokens = np.array(fed).tolist()
        return _together([row.follow(token, logits.shape[-1]) for row, token in zip(self.rows, tokens, strict=True)])

    def _choose(self, logits: mx.array, fed: mx.array, allowed: mx.array | None) -> _Choice:
        if all(row.greedy for row in self.rows):
            return _Choice(logits, *choose(logits, None, greedy, (), allowed))
        one = [slice(i, i + 1) for i in range(len(self.rows))]
        chosen = [
            self._choose_one(i, logits[at], fed[at], None if allowed is None else allowed[at])
            for i, at in enumerate(one)
        ]
        return _Choice(logits, *(mx.concatenate(list(part)) for part in zip(*chosen, strict=True)))

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

    def _queue(self) -> None:
        reported = any(row.logprobs is not None for row in self.rows)
        mx.async_eval(self.next.tokens, *([self.next.scores] if reported else []))  # type: ignore[no-untyped-call]


def _without(index: int, count: int) -> list[int]:
    """The rows that stay when one leaves, the last one in its place: no other has to be moved."""
    keep = list(range(count - 1))
    if index < count - 1:
        keep[index] = count - 1
    return keep


def _together(masks: Sequence[Mask | None]) -> mx.array | None:
    """One mask for all rows, (B, V); None if no row has one."""
    sizes = [mask.size for mask in masks if mask is not None]
    if not sizes:
        return None
    return mx.array(np.stack([np.ones(sizes[0], np.bool_) if mask is None else mask for mask in masks]))


class DecodeBatch:
    """Rows that decode side by side, whatever their caches, samplers and lengths.

    Rows whose caches are alike and have a batch form share one forward; the others take one forward each, as do all
    rows of an architecture that was not verified in batches. If a step raises anything but `RowFailed`, no row's cache
    can be used any more.
    """

    def __init__(self, model: nn.Module, staged: StagedModel | None = None, ranks: Ranks | None = None) -> None:
        """Args:
        staged: the same model in two parts, for rows that need it.
        ranks: over which the model is spread, if it is.
        """
        self._model = model
        self._staged = staged
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
        """One for each forward of a step."""
        return [group.cache for group in self._groups]

    def add(self, row: DecodeRow) -> None:
        """Let a row take part from the next step on. Its first token comes from its logits, without a forward.

        Raises:
            ValueError: there is a row with this uid already.
        """
        if row.uid in self.uids:
            raise ValueError(f"row {row.uid} is decoding already")
        key = batch_key(row.cache) if self._batched else None
        self._groups.append(_Group(self._model, self._staged, row, key, self._ranks))

    def first_token(self, uid: int) -> TokenEvent:
        """What the newest row begins with, before a step feeds it, which will not return it again.

        A forward takes time to set up; a client that waits for its first token need not wait for that.
        """
        newest = self._groups[-1]
        assert [row.uid for row in newest.rows] == [uid]
        return newest.first_event()

    def remove(self, uid: int) -> Removed:
        """Take a row out, between two steps; the others go on.

        Raises:
            KeyError: there is no such row.
        """
        for group in self._groups:
            for index, row in enumerate(group.rows):
                if row.uid == uid:
                    removed = group.remove(index)
                    self._groups = [group for group in self._groups if group.rows]
                    return removed
        raise KeyError(uid)

    def step(self) -> list[tuple[int, TokenEvent]]:
        """One token of every row, by uid. Who has enough of a row removes it.

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
        alike: dict[Hashable, list[_Group]] = {}
        for group in self._groups:
            alike.setdefault(id(group) if group.key is None else group.key, []).append(group)
        # On several machines, who joins can't depend on how fast one of them copies.
        until = math.inf if self._ranks is not None else time.monotonic() + COPYING_S
        self._groups = [group for first, *others in alike.values() for group in (first, *first.admit(others, until))]
