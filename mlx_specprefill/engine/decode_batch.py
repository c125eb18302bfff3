"""Continuous batching: one forward per step for all rows, which join and leave at any step.

In float32 a row's answer does not depend on the other rows. In half precision rounding depends on the number of rows in
a forward, and two tokens that are almost equally likely can change places.

The next forward is queued before the tokens of this step are read. So after every step a row's cache holds its prompt
and exactly the tokens that steps have returned, including the last. Nothing is rolled back, which recurrent states
could not be. A row with a grammar needs its token on the host before the next can be chosen: the token is read, and the
mask made, while the forward runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapters.probe import probe_quantized
from ..adapters.registry import adapter_for, architecture_of
from ..adapters.rope import adjust_offsets
from ..cache.positioned import quantize_kv
from ..cache.rows import batch_key, extend_batch, extract_row, filter_batch, give_back, make_room, merge_rows
from ..config import EngineConfig
from ..constraints import GrammarState, Mask, stack_masks
from ..distributed.ranks import Ranks
from ..errors import InvalidRequestError, SparseUnsupportedError
from ..loading import ModelPair
from ..request import TokenEvent
from ..sampling import LogitsProcessor, Sampler, choose, greedy, make_sampler, processors_of, token_event
from ..speculative.proposers import Proposer
from ..speculative.row import Limits, SpeculativeRow
from ..speculative.verification import TokenSampler
from .caches import empty_cache
from .memory import cache_bytes
from .sequence import Sequence, log_failure
from .speculation import AnswerDrafter

# Seconds of a step for copying caches when rows join or leave. Copying all at once took half a second where a step
# takes 60 ms (a dozen rows, the longest 6 000 tokens, 2 cores).
COPYING_S = 0.02


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
    """State of one row on the host. Its cache is in that of the batch."""

    def __init__(self, spec: DecodeRow) -> None:
        self.uid = spec.uid
        self.sampler = spec.sampler
        self.processors = spec.processors
        self.logprobs = spec.logprobs
        self.shift = spec.shift
        self.grammar = spec.grammar
        self.tokens = list(spec.generated)
        self.told = False  # the next token is known already
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


class _Group:
    """Rows that share a forward. A single row keeps its own cache."""

    def __init__(self, model: nn.Module, spec: DecodeRow, ranks: Ranks | None) -> None:
        self._model = model
        self._ranks = ranks
        self.rows = [_Row(spec)]
        self.cache = spec.cache
        first = None if spec.grammar is None else spec.grammar.mask(spec.logits.shape[-1])
        tokens, scores = self.rows[0].choose(spec.logits, None if first is None else mx.array(first)[None])
        self.next = _Choice(self._broadcast(tokens), scores)
        self._queue()

    @cached_property
    def key(self) -> Hashable | None:
        """Return a key that groups of one kind of cache share; None: these rows join no other."""
        return batch_key(self.cache)

    def advance(self) -> _Choice:
        """Feed every row's token and queue the next choice; return the tokens fed."""
        fed = self.next
        with adjust_offsets([row.shift for row in self.rows]):
            logits = self._model(fed.tokens[:, None], cache=self.cache)[:, -1, :]
        chosen = self._choose(logits, fed.tokens, self._grammar_masks(logits, fed.tokens))
        self.next = chosen._replace(tokens=self._broadcast(chosen.tokens))
        self._queue()
        return fed

    def _broadcast(self, tokens: mx.array) -> mx.array:
        """Return rank 0's choice: machines may round differently."""
        return tokens if self._ranks is None else self._ranks.broadcast_tokens(tokens)

    def events(self, fed: _Choice) -> list[tuple[int, TokenEvent]]:
        events = []
        for index, (row, token) in enumerate(zip(self.rows, np.array(fed.tokens).tolist(), strict=True)):
            row.tokens.append(token)
            if not row.told:
                events.append((row.uid, self._event(index, token, fed)))
            row.told = False
        return events

    def first_event(self) -> TokenEvent:
        """Return the first event of a group of one row, before its first step."""
        self.rows[0].told = True
        return self._event(0, int(np.array(self.next.tokens)[0]), self.next)

    def _event(self, index: int, token: int, choice: _Choice) -> TokenEvent:
        return token_event(token, choice.scores[index : index + 1], self.rows[index].logprobs)

    def admit(self, others: Seq[_Group], until: float) -> list[_Group]:
        """Merge other groups until the time is over. The rest run on their own until the next step.

        Args:
            others: groups of one row, with the same key.
            until: by `time.monotonic`.

        Returns:
            The groups that were not merged.
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

    def absorb(self, others: Seq[_Group]) -> None:
        """Merge the rows of other groups with the same key."""
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
        cache = self.cache
        if keep:
            cache = extract_row(self.cache, index)
            # What still reads a cache keeps it from changing in place.
            mx.eval([part.state for part in cache], self.next.tokens)
            self._keep(keep)
        # Queued now: arrays that are still to be cut out of the batch keep all of it alive.
        mx.async_eval([part.state for part in (*cache, *self.cache)], self.next.tokens)  # type: ignore[no-untyped-call]
        self.rows = [self.rows[other] for other in keep]
        return Removed(cache, tuple(row.tokens))

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

    def _queue(self) -> None:
        reported = any(row.logprobs is not None for row in self.rows)
        mx.async_eval(self.next.tokens, *([self.next.scores] if reported else []))  # type: ignore[no-untyped-call]


def _without(index: int, count: int) -> list[int]:
    """Return the remaining rows' indices, the last one in the removed one's place, so that no other row moves."""
    keep = list(range(count - 1))
    if index < count - 1:
        keep[index] = count - 1
    return keep


class DecodeBatch:
    """Decodes rows of any caches, samplers and lengths.

    Rows with the same kind of cache, if that has a batch form, share one forward. Other rows, and all rows of an
    architecture that was not verified in batches, take a forward each. If a step raises anything but `RowFailed`, all
    rows' caches are unusable.
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
        self._groups.append(_Group(self._model, row, self._ranks))

    def first_token(self) -> TokenEvent:
        """Return the newest row's first token before its first step, which then does not return it.

        The first forward takes time to set up; the client gets its first token before that.
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
                    removed = group.remove(index)
                    self._groups = [group for group in self._groups if group.rows]
                    return removed
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
        """Merge groups of one kind. A group alone is looked at, too: its batch may give back space."""
        if not self._batched or (len(self._groups) == 1 and len(self._groups[0].rows) == 1):
            return
        alike: dict[Hashable, list[_Group]] = {}
        for group in self._groups:
            alike.setdefault(id(group) if group.key is None else group.key, []).append(group)
        # With several ranks the merge can't depend on how fast one of them copies.
        until = math.inf if self._ranks is not None else time.monotonic() + COPYING_S
        self._groups = [group for first, *others in alike.values() for group in (first, *first.admit(others, until))]


log = logging.getLogger(__name__)
Outcome = tuple[int, TokenEvent | Exception]  # of the row with this uid; after an error it is removed


class _Drafted(NamedTuple):
    """A sequence whose row decodes with proposals, beside the batch."""

    sequence: Sequence
    drafting: AnswerDrafter
    row: SpeculativeRow


class Rows:
    """Sequences between their prefill and their last token."""

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self._pair = pair
        self._kv_bits = config.kv_bits
        self._batch = DecodeBatch(pair.target, pair.ranks)
        self._drafted: dict[int, _Drafted] = {}

    def __len__(self) -> int:
        return len(self._batch) + len(self._drafted)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows' caches. In a batch every row takes as much as the longest."""
        drafted = (drafted.row.cache for drafted in self._drafted.values())
        return sum(cache_bytes(cache) for cache in (*self._batch.caches, *drafted))

    def add(self, sequence: Sequence, logits: mx.array) -> TokenEvent:
        """Start decoding a prefilled sequence; return its first token, chosen from `logits` (1, V)."""
        sequence.cache, sequence.shift = self.quantize(sequence.cache, sequence.shift)
        drafting = sequence.drafting
        if drafting is not None and drafting.proposer is not None:
            return self._add_drafted(sequence, drafting, drafting.proposer, logits)
        self._add_plain(sequence, logits)
        try:
            return self._batch.first_token()
        except Exception:  # else the next step would fail again
            self._batch.remove(sequence.uid)
            raise

    def step(self) -> Iterator[Outcome]:
        """Yield one token of every plain row, then one verification of a drafted row. Rows may leave in between."""
        yield from self._step_batch()
        yield from self._step_drafted()

    def remove(self, uid: int) -> Removed:
        """Remove a row; return its cache and the generated tokens in it."""
        if uid not in self._drafted:
            return self._batch.remove(uid)
        row = self._drafted.pop(uid).row
        return Removed(row.cache, tuple(row.tokens))

    def clear(self) -> None:
        """Remove all rows, whatever their state."""
        self._batch = DecodeBatch(self._pair.target, self._pair.ranks)
        self._drafted.clear()

    def _add_drafted(
        self, sequence: Sequence, drafting: AnswerDrafter, proposer: Proposer, logits: mx.array
    ) -> TokenEvent:
        request, V = sequence.request, logits.shape[-1]
        stops, processors = request.stop_token_ids, processors_of(request)
        drafting.row = SpeculativeRow(
            self._pair.target,
            sequence.cache,
            logits,
            proposer,
            TokenSampler(request.sampling, V, processors, sequence.grammar, stops),
            Limits(request.max_tokens, stops),
            logprobs=sequence.logprobs,
            shift=sequence.shift,
        )
        sequence.cache = []  # the row owns it now
        self._drafted[sequence.uid] = _Drafted(sequence, drafting, drafting.row)
        return drafting.row.first

    def _add_plain(self, sequence: Sequence, logits: mx.array) -> None:
        request = sequence.request
        self._batch.add(
            DecodeRow(
                uid=sequence.uid,
                cache=sequence.cache,
                logits=logits,
                sampler=make_sampler(request.sampling, self._pair.vocab_size),
                processors=processors_of(request),
                logprobs=sequence.logprobs,
                shift=sequence.shift,
                grammar=sequence.grammar,
                generated=tuple(sequence.tokens),
            )
        )
        sequence.cache = []  # the batch owns it now

    def quantize(self, cache: list[Any], shift: int = 0) -> tuple[list[Any], int]:
        """Return a prefilled cache as answers read it, and the shift that it can't carry itself."""
        if self._kv_bits is None or not self._reads_quantized:
            return cache, shift
        try:
            return quantize_kv(cache, self._kv_bits)
        except SparseUnsupportedError as error:
            log.warning("the KV cache of a request stays unquantised: %s", error)
            return cache, shift

    @cached_property
    def _reads_quantized(self) -> bool:
        """Return whether the target can read quantised caches. Checked and logged with the first row."""
        target = self._pair.target
        reason = probe_quantized(target, empty_cache(target), self._kv_bits or 8)
        if reason is not None:
            log.warning("the KV cache stays unquantised: %s", reason)
        return reason is None

    def _step_batch(self) -> list[Outcome]:
        """Step the batch. A failing forward fails its rows; the next ones start with an empty batch."""
        if not len(self._batch):
            return []
        try:
            return list(self._batch.step())
        except RowFailed as failed:
            log_failure(log, "a row failed", failed.__cause__)
            self._batch.remove(failed.uid)
            cause = failed.__cause__
            return [(failed.uid, cause if isinstance(cause, Exception) else failed)]
        except Exception as error:
            log.exception("decode step failed")
            lost = self._batch.uids
            self._batch = DecodeBatch(self._pair.target, self._pair.ranks)
            return [(uid, error) for uid in lost]

    def _step_drafted(self) -> Iterator[Outcome]:
        """Step the first drafted row. Beside other rows it joins the batch, and the next one is first."""
        if not self._drafted:
            return
        uid, (sequence, drafting, row) = next(iter(self._drafted.items()))
        try:
            events, leaving = drafting.step(row, alone=len(self) == 1)
        except Exception as error:  # noqa: BLE001 - one row must not end the others
            log_failure(log, "a speculative row failed", error)
            del self._drafted[uid]
            yield uid, error
            return
        yield from ((uid, event) for event in events)
        if leaving is not None and uid in self._drafted:
            del self._drafted[uid]
            drafting.leave(leaving)
            sequence.cache = row.cache
            self._add_plain(sequence, row.logits)
