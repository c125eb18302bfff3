"""Continuous batching: rows of like length share a forward in each step, and join and leave at any step.

In float32 a row's answer does not depend on the other rows. In half precision rounding depends on the number of rows in
a forward, and two tokens that are almost equally likely can change places.

The next forward is queued before the tokens of this step are read. So after every step a row's cache holds its prompt
and exactly the tokens that steps have returned, including the last. Nothing is rolled back, which recurrent states
could not be. A row with a grammar needs its token on the host before the next can be chosen: the token is read, and the
mask made, while the forward runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapters.registry import adapter_for, architecture_of
from ..adapters.rope import adjust_offsets
from ..arrays import Bools
from ..cache.rows import (
    batch_key,
    extend_batch,
    extract_row,
    filter_batch,
    give_back,
    limit_idle,
    make_room,
    merge_rows,
    padding_bytes,
    row_bytes,
)
from ..constraints import GrammarState, stack_masks
from ..distributed.ranks import Ranks, broadcast
from ..errors import InvalidRequestError
from ..events import TokenEvent
from ..sampling import LogitsProcessor, Sampler, choose, greedy, token_event
from .footprint import cache_bytes, read_bytes
from .grouping import padding, regroup

# Seconds of a step for copying caches when rows join or leave. Copying all at once took half a second where a step
# takes 60 ms (a dozen rows, the longest 6 000 tokens, 2 cores).
COPYING_S = 0.02
# Bytes of padding per byte of tokens at most, on a CPU. On a GPU only the weights and the free memory are limits:
# there a step takes as long as it reads, and a few short rows are less than the weights.
_MOST_PADDING = 0.5
_PLANNED_FOR = 16  # steps, unless rows come or go: rows become more alike as they grow
_UNLIMITED = 1 << 62  # bytes


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
    """State of one row on the host. Its cache is in that of the batch.

    Attributes:
        lot: equal in rows that are to share a forward; the uid of one of them.
    """

    def __init__(self, spec: DecodeRow) -> None:
        self.uid = self.lot = spec.uid
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
    """Rows that share a forward. A single row keeps its own cache.

    Attributes:
        lot: of most of its rows. The others are to leave it.
    """

    model: nn.Module
    ranks: Ranks | None
    rows: list[_Row]
    cache: list[Any]
    next: _Choice

    def __post_init__(self) -> None:
        self.lot = self.rows[0].lot

    @classmethod
    def of(cls, model: nn.Module, spec: DecodeRow, ranks: Ranks | None) -> _Group:
        """Return a group of a new row, whose first token is chosen and queued."""
        row = _Row(spec)
        first = None if spec.grammar is None else spec.grammar.mask(spec.logits.shape[-1])
        choice = _Choice(*row.choose(spec.logits, None if first is None else mx.array(first)[None]))
        group = cls(model, ranks, [row], spec.cache, choice)
        group._follow(choice)
        return group

    @cached_property
    def key(self) -> Hashable | None:
        """Return a key that groups of one kind of cache share; None: these rows join no other."""
        return batch_key(self.cache)

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

    def admit(self, others: Seq[_Group], until: float) -> list[_Group]:
        """Merge other groups until the time is over. The rest run on their own until the next step.

        Args:
            others: groups with the same key and no more rows.
            until: by `time.monotonic`.

        Returns:
            The groups that were not merged.
        """
        if len(self.rows) == 1:
            if others:
                self.absorb(others)
            return []
        joining, waiting, rows = list[_Group](), list[_Group](), 0
        for other in others:
            rows += len(other.rows)
            fits = make_room(self.cache, rows, other.cache, until)
            (joining if fits else waiting).append(other)
        if joining:
            self.absorb(joining)
        if not others:
            give_back(self.cache, until)
        return waiting

    def absorb(self, others: Seq[_Group]) -> None:
        """Merge the rows of other groups with the same key."""
        others = sorted(others, key=lambda other: len(other.rows) == 1)
        single = [other.cache for other in others if len(other.rows) == 1]
        if len(self.rows) == 1:
            self.cache = merge_rows([self.cache, *single])
        else:
            batches = [other.cache for other in others if len(other.rows) > 1]
            for batch in (*batches, *([merge_rows(single)] if single else [])):
                extend_batch(self.cache, batch)
        self.rows += [row for other in others for row in other.rows]
        self.next = _Choice(
            *(mx.concatenate(list(part)) for part in zip(self.next, *(g.next for g in others), strict=True))
        )

    @property
    def strays(self) -> list[int]:
        """Return the indices of the rows that are to leave."""
        return [index for index, row in enumerate(self.rows) if row.lot != self.lot]

    def take(self, index: int) -> _Group:
        """Take a row out; return it as a group of its own."""
        row, keep = self.rows[index], _without(index, len(self.rows))
        cache, choice = self.cache, self.next
        if keep:
            cache, choice = extract_row(self.cache, index), _Choice(*(part[index : index + 1] for part in self.next))
            # What still reads a cache keeps it from changing in place.
            mx.eval([part.state for part in cache], self.next.tokens)
            self._keep(keep)
        # Queued now: arrays that are still to be cut out of the batch keep all of it alive.
        mx.async_eval([part.state for part in (*cache, *self.cache)], self.next.tokens)  # type: ignore[no-untyped-call]
        self.rows = [self.rows[other] for other in keep]
        return _Group(self.model, self.ranks, [row], cache, choice)

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == 1:
            self.cache = extract_row(self.cache, rows[0])
        else:
            filter_batch(self.cache, rows)
        self.next = _Choice(*(part[mx.array(rows)] for part in self.next))

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


def _without(index: int, count: int) -> list[int]:
    """Return the remaining rows' indices, the last one in the removed one's place, so that no other row moves."""
    keep = list(range(count - 1))
    if index < count - 1:
        keep[index] = count - 1
    return keep


class DecodeBatch:
    """Decodes rows of any caches, samplers and lengths.

    Rows with the same kind of cache, if that has a batch form, share a forward with those of like length. Other rows,
    and all rows of an architecture that was not verified in batches, take a forward each. If a step raises anything but
    `RowFailed`, all rows' caches are unusable.

    Attributes:
        padding: bytes of the caches beside the rows' tokens and these rows' room to grow.
    """

    def __init__(
        self, model: nn.Module, ranks: Ranks | None = None, room: Callable[[int], int | None] = lambda own: None
    ) -> None:
        """Args:
        ranks: over which the model is spread, if it is.
        room: returns the bytes that `padding` may have beside rows of `own` bytes; None: any number.
        """
        self._model = model
        self._ranks = ranks
        self._room = room
        self._batched = adapter_for(architecture_of(model)).batch_refusal is None
        self._read = read_bytes(model)
        self._most = math.inf if mx.default_device() == mx.Device(mx.gpu) else _MOST_PADDING
        self._groups: list[_Group] = []
        self._planned = 0  # steps until the next plan
        self._measured = 0  # bytes of batches when `padding` was measured; -1: other rows are in them
        self.padding = 0

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
        self.plan_anew()

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
                    removed = group.take(index)
                    self._groups = [group for group in self._groups if group.rows]
                    self._measured = -1
                    self._measure()
                    self.plan_anew()
                    return Removed(removed.cache, tuple(row.tokens))
        raise KeyError(uid)

    def plan_anew(self) -> None:
        """Decide at the next step which rows share a forward: there are other rows, or less room."""
        self._planned = 0

    def step(self) -> list[tuple[int, TokenEvent]]:
        """Return one token of every row, by uid. The caller removes rows that have ended.

        Raises:
            RowFailed: before anything was done; the row that it names has to be removed.
        """
        for row in (row for group in self._groups for row in group.rows):
            if row.failure is not None:
                raise RowFailed(row.uid) from row.failure
        self._arrange()
        fed = [group.advance() for group in self._groups]
        self._measure()
        return [event for group, choice in zip(self._groups, fed, strict=True) for event in group.events(choice)]

    def _arrange(self) -> None:
        """Split and merge groups as planned, until the time is over.

        A group alone is looked at, too: its batch may give back space.
        """
        if not self._batched or (len(self._groups) == 1 and len(self._groups[0].rows) == 1):
            return
        if self._planned == 0:
            self._plan()
            self._measured = -1
        self._planned -= 1
        before = self._groups
        # With several ranks this can't depend on how fast one of them copies.
        until = math.inf if self._ranks is not None else time.monotonic() + COPYING_S
        self._groups = self._merge([*before, *self._split(until)], until)
        if self._groups != before:
            self._measured = -1

    def _measure(self) -> None:
        """Measure `padding` if caches have changed in size, which they seldom do, or in their rows."""
        batches = [group.cache for group in self._groups if len(group.rows) > 1]
        held = sum(map(cache_bytes, batches))
        if held != self._measured:
            self._measured, self.padding = held, sum(map(padding_bytes, batches))

    def _split(self, until: float) -> list[_Group]:
        """Return the rows that left their groups."""
        left = []
        for group in self._groups:
            while strays := group.strays:
                left.append(group.take(strays[0]))
                if time.monotonic() >= until:
                    return left
        return left

    def _merge(self, groups: Seq[_Group], until: float) -> list[_Group]:
        lots: dict[int, list[_Group]] = {}
        for group in sorted(groups, key=lambda group: -len(group.rows)):
            lots.setdefault(group.lot, []).append(group)
        return [group for first, *others in lots.values() for group in (first, *first.admit(others, until))]

    def _plan(self) -> None:
        """Decide which rows share a forward from now on, and how many bytes may lie idle beside them."""
        self._planned = _PLANNED_FOR
        kinds: dict[Hashable, list[_Group]] = {}
        for group in self._groups:
            if group.key is not None:
                kinds.setdefault(group.key, []).append(group)
        sizes = {
            key: [size for group in groups for size in row_bytes(group.cache, len(group.rows))]
            for key, groups in kinds.items()
        }
        room = self._room(sum(map(sum, sizes.values())))
        left = _UNLIMITED if room is None else room
        for key, groups in kinds.items():
            left -= self._plan_kind(groups, sizes[key], left)
        for group in self._groups:
            limit_idle(group.cache, max(0, left) // len(self._groups))

    def _plan_kind(self, groups: Seq[_Group], sizes: Seq[int], room: int) -> int:
        """Plan for groups with one kind of cache; return the bytes of padding.

        Args:
            sizes: of all their rows.
        """
        most = min(room, self._most * max(1, sum(sizes)))
        ends = list(accumulate(len(group.rows) for group in groups))
        now = [range(end - len(group.rows), end) for group, end in zip(groups, ends, strict=True)]
        planned = broadcast(self._ranks, "groups", lambda: regroup(sizes, now, self._read, most))
        rows = [row for group in groups for row in group.rows]
        for together in planned:
            for index in together:
                rows[index].lot = rows[together[0]].uid
        for group in groups:
            group.lot = statistics.mode(row.lot for row in group.rows)
        return padding(sizes, planned)
