"""Which answers are decoded by proposals, and the rows that are. MLX thread only.

A speculative row decodes by itself, one forward per tick of the engine, beside the batch of plain rows. So whatever is
drafted, another row waits for one forward at most. A row that was engaged by "auto" joins the plain batch when others
come, because a shared forward is cheaper than speculation, and when its proposals are accepted too rarely to pay.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..config import EngineConfig, SpeculationName
from ..errors import RequestCancelled
from ..loading import ModelPair
from ..request import GenerationRequest, Progress, TokenEvent
from ..sampling import LogitsProcessor, logits_processors
from ..speculative.forward_cost import measure_forwards, measure_head
from ..speculative.gain import Acceptance, DecodeCosts, GainInputs, predicted_gain
from ..speculative.mtp_proposer import PromptReader
from ..speculative.row import LastForward, Limits, SpeculativeRow
from ..speculative.strategies import STRATEGIES, ProposerInputs, StrategyName, refusals
from ..speculative.token_sampler import TokenSampler
from .scheduler import Scheduler
from .sequence import Sequence, Speculation

__all__ = ["Speculator"]

log = logging.getLogger(__name__)
_PRIORS: dict[StrategyName, float] = {"draft": 0.75, "retrieval": 0.9, "triforce": 0.9, "mtp": 0.7, "ngram": 0.7}
_INNER_PRIOR = 0.7
_COVERAGE_PRIORS: dict[StrategyName, float] = {"ngram": 0.5}  # the others propose in every round
_ENOUGH = 24  # judged tokens after which a row's own acceptance counts


class Speculator:
    """Decides, prepares and runs. What it has to measure, it measures when the first request asks for it.

    Args:
        scheduler: knows whether other answers are running.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, scheduler: Scheduler) -> None:
        self.pair = pair
        self._scheduler = scheduler
        self.config = config.speculation
        self._quantized = config.kv_bits is not None
        self._refusals: dict[StrategyName, str | None] | None = None
        self._costs: DecodeCosts | None = None
        self._outer = {name: Acceptance(prior) for name, prior in _PRIORS.items()}
        self._inner = Acceptance(_INNER_PRIOR)
        self._coverage = {name: Acceptance(_COVERAGE_PRIORS.get(name, 1.0)) for name in _PRIORS}
        self._rows: dict[int, Speculation] = {}
        self._turns: deque[int] = deque()

    # --- the decision ------------------------------------------------------------------------------------------------

    def decide(self, sequence: Sequence, context: int, read: bool) -> Speculation | None:
        """How a request's answer is drafted; None where neither the request nor the server asks for it.

        Args:
            context: tokens that the target's cache will hold.
            read: the draft has read the prompt anyway.
        """
        own = sequence.request.specprefill.speculative
        asked: SpeculationName = own or self.config.strategy
        if asked == "off":
            return None if own is None else Speculation(None, "turned off by the request")
        if asked == "auto":
            return self._automatic(sequence.request, context, read)
        refusal = self.refusals[asked]
        return Speculation(None, refusal) if refusal is not None else Speculation(asked, "requested")

    @property
    def refusals(self) -> dict[StrategyName, str | None]:
        """Why a strategy can't run with this pair, None where it can."""
        if self._refusals is None and self.pair.ranks is not None:
            self._refusals = dict.fromkeys(STRATEGIES, "the target runs on several machines")
        if self._refusals is None:
            self._refusals = refusals(self.pair.target, self.pair.proposer, self.pair.mtp, self._quantized)
        return self._refusals

    def _automatic(self, request: GenerationRequest, context: int, read: bool) -> Speculation:
        for known in (*self._outer.values(), *self._coverage.values(), self._inner):
            known.forget()
        if self._scheduler.decoding:
            return Speculation(None, "other answers are running, and a shared forward is cheaper")
        if request.sampling.seed is not None and request.sampling.temperature > 0:
            return Speculation(None, "a seeded text must not depend on what was measured")
        possible = [name for name, refusal in self.refusals.items() if refusal is None]
        possible = [name for name in possible if read or not STRATEGIES[name].needs_reading]
        if not possible:
            reasons = {reason for reason in self.refusals.values() if reason is not None}
            return Speculation(None, "; ".join(sorted(reasons)) or "the draft has not read the prompt")
        gains = {
            name: self._gain(name, context, self._outer[name].rate, self._inner.rate, self._coverage[name].rate)
            for name in possible
        }
        best = max(gains, key=lambda name: gains[name])
        said = f"{best} is predicted to be {gains[best]:.2f} times as fast, {self.config.min_gain:g} is needed"
        if gains[best] >= self.config.min_gain:
            return Speculation(best, said, auto=True, context=context)
        if "ngram" in possible and _likeliest(request):
            found = self._gain("ngram", context, self._outer["ngram"].rate, 0.0, coverage=1.0)
            if found >= self.config.min_gain:
                said = (
                    f"ngram is predicted to be {found:.2f} times as fast where it proposes, and costs nothing elsewhere"
                )
                return Speculation("ngram", said, auto=True, context=context)
        return Speculation(None, said)

    def _gain(self, name: StrategyName, context: int, outer: float, inner: float, coverage: float) -> float:
        draft_context = self.config.window if name == "triforce" else context
        inputs = GainInputs(context, draft_context, outer, inner, coverage)
        return predicted_gain(name, self.costs, self.config, inputs)

    @property
    def costs(self) -> DecodeCosts:
        if self._costs is None:
            config = self.config
            rows = (1, *(count + 1 for count in (config.gamma, config.gamma1, config.gamma2, config.ngram)))
            drafts = self.pair.draft is not None and self.refusals["draft"] is None
            draft = measure_forwards(self.pair.draft, (1,))[1] if drafts else None
            head = None if isinstance(self.pair.mtp, str) else measure_head(self.pair.mtp)
            self._costs = DecodeCosts(measure_forwards(self.pair.target, rows), draft, head)
        return self._costs

    # --- from the prefill to a row -----------------------------------------------------------------------------------

    def begin(self, sequence: Sequence, context: int, read: bool) -> bool:
        """Decide, as `decide`; whether the draft goes on after the prompt, so that it has to have read it."""
        chosen = sequence.speculation = self.decide(sequence, context, read)
        return chosen is not None and chosen.strategy is not None and STRATEGIES[chosen.strategy].needs_reading

    def forward(self, sequence: Sequence, fed: npt.NDArray[np.int32]) -> Callable[[], AbstractContextManager[None]]:
        """A context for each of the target's forwards over the prompt's indices `fed`: the MTP head reads along."""
        chosen, head = sequence.speculation, self.pair.mtp
        if chosen is None or chosen.strategy is None or not STRATEGIES[chosen.strategy].needs_head:
            return nullcontext
        assert not isinstance(head, str)
        chosen.reader = PromptReader(head, sequence.request.prompt, fed)
        return chosen.reader.forward

    def last_forward(self, sequence: Sequence) -> LastForward | None:
        """With the draft's look-ahead, where it would be proposed first anyway; unread grammars may forbid it."""
        if sequence.draft_cache is None or sequence.grammar is not None or self._quantized:
            return None
        assert sequence.speculation is not None
        sequence.speculation.last = LastForward(self.pair.target, sequence.lookahead)
        return sequence.speculation.last

    def end(self, sequence: Sequence) -> Generator[Progress, None, None]:
        """Make the proposer of a prefilled sequence; whatever fails here costs the saving, never the answer."""
        chosen = sequence.speculation
        if chosen is None or chosen.strategy is None:
            return
        given = ProposerInputs(
            self.pair.target,
            sequence.cache,
            sequence.request.prompt,
            self.config,
            self.pair.draft,
            sequence.draft_cache,
            sequence.kept,
            chosen.reader,
        )
        try:
            chosen.proposer = yield from STRATEGIES[chosen.strategy].start(given)
        except RequestCancelled:
            raise
        except Exception as error:
            log.exception("%s could not start", chosen.strategy)
            chosen.decline(f"{chosen.strategy} could not start: {type(error).__name__}: {error}")

    def add(self, sequence: Sequence, logits: mx.array, processors: list[LogitsProcessor]) -> SpeculativeRow | None:
        """The sequence's row, if it is to have one. It owns the cache from here on."""
        chosen, request = sequence.speculation, sequence.request
        if chosen is None or chosen.strategy is None or chosen.proposer is None:
            return None
        sampler = TokenSampler(request.sampling, logits.shape[-1], processors, sequence.grammar, request.stop_token_ids)
        row = SpeculativeRow(
            self.pair.target,
            sequence.cache,
            logits,
            chosen.proposer,
            sampler,
            Limits(request.max_tokens, request.stop_token_ids),
            STRATEGIES[chosen.strategy].gamma(self.config),
            first=chosen.last,
            logprobs=request.logprobs,
            shift=sequence.shift,
        )
        chosen.row, chosen.free_tokens = row, len(row.early)
        self._rows[sequence.uid] = chosen
        self._turns.append(sequence.uid)
        return row

    # --- the rows ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, uid: int) -> bool:
        return uid in self._rows

    def next_turn(self) -> int | None:
        """The row whose forward is next, in turn."""
        if not self._turns:
            return None
        self._turns.rotate(-1)
        return self._turns[-1]

    def row(self, uid: int) -> SpeculativeRow:
        row = self._rows[uid].row
        assert row is not None
        return row

    def step(self, uid: int, why: str | None) -> tuple[list[TokenEvent], str | None]:
        """One forward of a row: its tokens, and why it has to go on in the plain batch, if it has to.

        Args:
            why: it has to in any case.
        """
        row = self.row(uid)
        if why is not None:
            return row.leave(), why
        try:
            return row.step(), None
        except Exception as error:
            if not row.proposing:
                raise
            log.exception("a proposal failed")
            return row.leave(), f"a proposal failed: {type(error).__name__}: {error}"

    def leaves(self, uid: int, others: int) -> str | None:
        """Why a row should go on in the plain batch; None if it should not."""
        chosen = self._rows[uid]
        row = self.row(uid)
        if not chosen.auto or chosen.strategy is None:
            return None
        if others:
            return "other answers came, and a shared forward is cheaper"
        if row.acceptance.judged < _ENOUGH:
            return None
        inner = row.proposer.inner
        rates = row.acceptance.rate or 0.0, (inner.rate if inner is not None else None) or 0.0
        gain = self._gain(chosen.strategy, chosen.context + len(row.tokens), *rates, row.coverage.rate or 1.0)
        return f"too few proposals were accepted ({rates[0]:.0%})" if gain < 1 else None

    def remove(self, uid: int) -> Speculation:
        """Take a row out; what it showed is remembered."""
        row = self.row(uid)
        chosen = self._rows.pop(uid)
        self._turns.remove(uid)
        if chosen.strategy is not None:
            self._outer[chosen.strategy].add(row.acceptance.accepted, row.acceptance.judged)
            self._coverage[chosen.strategy].add(row.coverage.accepted, row.coverage.judged)
        if row.proposer.inner is not None:
            self._inner.add(row.proposer.inner.accepted, row.proposer.inner.judged)
        return chosen

    def clear(self) -> None:
        self._rows.clear()
        self._turns.clear()


def _likeliest(request: GenerationRequest) -> bool:
    """Whether each token is the likeliest one in any case: a row need not wait for it where nothing is proposed."""
    free = request.constraint is None and not request.min_tokens
    return free and request.sampling.temperature == 0 and not logits_processors(request.sampling)
