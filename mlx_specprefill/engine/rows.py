"""Decodes all running answers: plain rows in one batch, and rows with proposals. MLX thread only."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from ..adapters.probe import probe_quantized
from ..cache.positioned import quantize_kv
from ..config import EngineConfig
from ..errors import SparseUnsupportedError
from ..loading import ModelPair
from ..request import GenerationRequest, TokenEvent
from ..sampling import LogitsProcessor, held_back, logits_processors, make_sampler
from ..speculative.row import SpeculativeRow
from .admission.ledger import cache_bytes
from .caches import empty_cache
from .decode_batch import DecodeBatch, DecodeRow, RowFailed
from .failures import log_failure
from .sequence import Sequence
from .speculation import AnswerDrafter

__all__ = ["Outcome", "Rows"]

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
        self._config = config
        self._batch = DecodeBatch(pair.target, pair.stages, pair.ranks)
        self._drafted: dict[int, _Drafted] = {}

    def __len__(self) -> int:
        return len(self._batch) + len(self._drafted)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows' caches. In a batch every row takes as much as the longest."""
        drafted = (drafted.row.cache for drafted in self._drafted.values())
        return sum(cache_bytes(cache) for cache in (*self._batch.caches, *drafted))

    def add(self, sequence: Sequence, logits: mx.array) -> list[TokenEvent]:
        """Start decoding a prefilled sequence. Its next token comes from `logits` (1, V).

        Returns:
            Tokens that are known already: the first one, and those that the prefill found.
        """
        self._quantize(sequence)
        if sequence.drafting is not None and (row := self._begin_drafted(sequence, sequence.drafting, logits)):
            return row.early
        self._add_plain(sequence, logits)
        return [self._first_token(sequence.uid)]

    def step(self) -> Iterator[Outcome]:
        """Yield one token of every plain row, then one verification of a drafted row. Rows may leave in between."""
        yield from self._step_batch()
        yield from self._step_drafted()

    def remove(self, uid: int) -> tuple[list[Any], tuple[int, ...]]:
        """Remove a row; return its cache and the generated tokens in it."""
        if uid not in self._drafted:
            removed = self._batch.remove(uid)
            return removed.cache, removed.tokens
        row = self._drafted.pop(uid).row
        return row.cache, tuple(row.tokens)

    def clear(self) -> None:
        """Remove all rows, whatever their state."""
        self._batch = DecodeBatch(self._pair.target, self._pair.stages, self._pair.ranks)
        self._drafted.clear()

    def _begin_drafted(self, sequence: Sequence, drafting: AnswerDrafter, logits: mx.array) -> SpeculativeRow | None:
        """Start a drafted row; None if it is decoded plainly after all."""
        row = drafting.begin_row(
            sequence.model(self._pair),
            sequence.cache,
            logits,
            _processors(sequence.request),
            sequence.grammar,
            sequence.shift,
        )
        if row is not None:
            sequence.cache = []  # the row owns it now
            self._drafted[sequence.uid] = _Drafted(sequence, drafting, row)
        return row

    def _add_plain(self, sequence: Sequence, logits: mx.array) -> None:
        request = sequence.request
        self._batch.add(
            DecodeRow(
                uid=sequence.uid,
                cache=sequence.cache,
                logits=logits,
                sampler=make_sampler(request.sampling, self._pair.vocab_size),
                processors=_processors(request),
                logprobs=request.logprobs,
                shift=sequence.shift,
                grammar=sequence.grammar,
                generated=tuple(sequence.tokens),
                staged=sequence.staged,
            )
        )
        sequence.cache = []  # the batch owns it now

    def _first_token(self, uid: int) -> TokenEvent:
        """Return a row's first token. If this fails, the row is removed at once, so that the next step does not fail
        again.
        """
        try:
            return self._batch.first_token(uid)
        except Exception:
            self._batch.remove(uid)
            raise

    def _quantize(self, sequence: Sequence) -> None:
        bits, group = self._config.kv_bits, self._config.kv_group_size
        if bits is None or self._unquantized is not None:
            return
        try:
            sequence.cache, sequence.shift = quantize_kv(sequence.cache, group, bits)
        except SparseUnsupportedError as error:
            log.warning("the KV cache of a request stays unquantised: %s", error.reason)

    @cached_property
    def _unquantized(self) -> str | None:
        """Return why the target's KV cache can't be quantised. Checked and logged with the first row."""
        bits, target = self._config.kv_bits, self._pair.target
        assert bits is not None
        reason = probe_quantized(target, empty_cache(target), self._config.kv_group_size, bits)
        if reason is not None:
            log.warning("the KV cache stays unquantised: %s", reason)
        return reason

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
            self._batch = DecodeBatch(self._pair.target, self._pair.stages, self._pair.ranks)
            return [(uid, error) for uid in lost]

    def _step_drafted(self) -> Iterator[Outcome]:
        """Step the first drafted row. Beside other rows it joins the batch, and the next one is first."""
        uid = next(iter(self._drafted), None)
        if uid is None:
            return
        outcomes, leaving = self._forward_drafted(uid)
        yield from outcomes
        if leaving is not None and uid in self._drafted:
            self._join_batch(uid, leaving)

    def _forward_drafted(self, uid: int) -> tuple[list[Outcome], str | None]:
        """Run one verification; return its outcomes, and why the row goes on as a plain one, if it does."""
        drafted = self._drafted[uid]
        try:
            events, leaving = drafted.drafting.step(drafted.row, alone=len(self) == 1)
        except Exception as error:  # noqa: BLE001 - one row must not end the others
            log_failure(log, "a speculative row failed", error)
            del self._drafted[uid]
            return [(uid, error)], None
        return [(uid, event) for event in events], leaving

    def _join_batch(self, uid: int, why: str) -> None:
        sequence, drafting, row = self._drafted.pop(uid)
        drafting.leave(why)
        sequence.cache = row.cache
        self._add_plain(sequence, row.logits)


def _processors(request: GenerationRequest) -> list[LogitsProcessor]:
    """Return penalties and biases. A constraint handles `min_tokens` itself."""
    processors = logits_processors(request.sampling)
    if request.min_tokens and request.constraint is None:
        processors.append(held_back(request.stop_token_ids, request.min_tokens))
    return processors
