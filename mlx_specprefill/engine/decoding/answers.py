"""Answers in work: each row decodes in the batch or drafted, with a quantised KV cache if that is set."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx

from ...adapters.startup_checks import probe_quantized
from ...cache.positioned import quantize_kv
from ...choosing.sampling import make_sampler, processors_of
from ...config import EngineConfig
from ...errors import SparseUnsupportedError
from ...events import TokenEvent
from ...pair import ModelPair
from ...speculative.acceptance import TokenSampler
from ...speculative.proposer import Proposer
from ...speculative.speculative_row import SpeculativeRow
from ..prefixes.caches import empty_cache
from ..requests.active_request import ActiveRequest
from ..requests.drafting import AnswerDrafter
from ..requests.failures import log_failure
from .decode_batch import DecodeBatch, DecodeRow, Removed, RowFailed

log = logging.getLogger(__name__)
Outcome = tuple[int, TokenEvent | Exception]  # of the row with this uid; after an error it is removed


class _Drafted(NamedTuple):
    """A active whose row decodes with proposals, beside the batch."""

    active: ActiveRequest
    drafting: AnswerDrafter
    row: SpeculativeRow


class Rows:
    """Sequences between their prefill and their last token."""

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self._pair = pair
        self._kv_bits = config.kv_bits
        self._batch = self._make_batch()
        self._drafted: dict[int, _Drafted] = {}

    def __len__(self) -> int:
        return len(self._batch) + len(self._drafted)

    def add(self, active: ActiveRequest, logits: mx.array) -> TokenEvent:
        """Begin to decode a request behind its prefill. Return its first token, chosen from `logits` (1, V)."""
        active.cache, active.decoded.shift = self.quantize(active.cache, active.decoded.shift)
        drafting = active.drafting
        if drafting is not None and drafting.proposer is not None:
            return self._add_drafted(active, drafting, drafting.proposer, logits)
        self._add_plain(active, logits)
        try:
            return self._batch.first_token()
        except Exception:  # else the next step would fail again
            self._batch.remove(active.uid)
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
        self._batch = self._make_batch()
        self._drafted.clear()

    def _make_batch(self) -> DecodeBatch:
        return DecodeBatch(self._pair.target, self._pair.ranks)

    def _add_drafted(
        self, active: ActiveRequest, drafting: AnswerDrafter, proposer: Proposer, logits: mx.array
    ) -> TokenEvent:
        request, V = active.request, logits.shape[-1]
        stops, processors = request.stop_token_ids, processors_of(request)
        drafting.row = SpeculativeRow(
            self._pair.target,
            active.cache,
            logits,
            proposer,
            TokenSampler(request.sampling, V, processors, active.grammar, stops),
            request.max_tokens,
            logprobs=active.request.logprobs,
            shift=active.decoded.shift,
        )
        active.cache = []  # the row owns it now
        self._drafted[active.uid] = _Drafted(active, drafting, drafting.row)
        return drafting.row.first

    def _add_plain(self, active: ActiveRequest, logits: mx.array) -> None:
        request = active.request
        self._batch.add(
            DecodeRow(
                uid=active.uid,
                cache=active.cache,
                logits=logits,
                sampler=make_sampler(request.sampling, self._pair.vocab_size),
                processors=processors_of(request),
                logprobs=active.request.logprobs,
                shift=active.decoded.shift,
                grammar=active.grammar,
                generated=tuple(active.decoded.tokens),
            )
        )
        active.cache = []  # the batch owns it now

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
            self._batch = self._make_batch()
            return [(uid, error) for uid in lost]

    def _step_drafted(self) -> Iterator[Outcome]:
        """Step the first drafted row. Beside other rows it joins the batch, and the next one is first."""
        if not self._drafted:
            return
        uid, (active, drafting, row) = next(iter(self._drafted.items()))
        try:
            events, leaving = drafting.step(row, alone=len(self) == 1)
            yield from ((uid, event) for event in events)
            if leaving is not None and uid in self._drafted:
                del self._drafted[uid]
                drafting.leave(leaving)
                active.cache = row.cache
                self._add_plain(active, row.logits)
        except Exception as error:  # noqa: BLE001 - one row must not end the others
            log_failure(log, "a speculative row failed", error)
            self._drafted.pop(uid, None)
            yield uid, error
