"""Hundreds of requests at once, cancelled and failing at random: every one ends, none is wrong, nothing is left behind.

`SOAK_REQUESTS=2000` in the environment makes it the long version.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    PromptSpan,
    RequestHandle,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.engine import prefill as prefiller_module
from mlx_specprefill.engine import rows, scoring
from mlx_specprefill.engine.decode_batch import DecodeBatch
from mlx_specprefill.sampling import processors_of
from mlx_specprefill.specprefill.sparse_prefill import feed
from tests.engine.held import unaccounted
from tests.support.steps import finish, prefill
from tests.support.tiny import random_prompt, tiny_pair
from tests.support.waiting import eventually

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "200"))
FAMILIES = ("llama", "qwen3_5", "gpt_oss")
ANSWER = 10
CANCELLED, FAULTY, FOLLOWED = 0.3, 0.1, 0.2
CLEAR = 1e-3  # logits closer than this may change places with the order of summation
CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=150, keep_pct=Fraction(3, 10)),
    prefill_step=128,
    max_rows=8,
    prefix_cache_bytes=4 << 20,  # small: evictions are part of the exercise
)
SEVERAL = pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.nightly) for family in FAMILIES[1:])]
)
pytestmark = [pytest.mark.extended, pytest.mark.timeout(60 + 3 * REQUESTS)]


class Injected(Exception):  # noqa: N818
    """A fault of this test's own making."""


class Faults:
    """Makes the stages raise now and then. Called on the MLX thread only."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.raised: Counter[str] = Counter()

    def strike(self, stage: str, share: float) -> None:
        if self._rng.random() < share:
            self.raised[stage] += 1
            raise Injected(stage)

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((scoring, "scorer_for"), (prefiller_module, "select_tokens")):
                patch.setattr(module, name, self._before(name, getattr(module, name)))
            patch.setattr(prefiller_module, "feed", self._during(feed))
            patch.setattr(rows, "processors_of", self._processors(processors_of))
            yield

    def _before(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.strike(stage, FAULTY)
            return work(*args, **kwargs)

        return wrapped

    def _during(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            slices = work(*args, **kwargs)
            while True:
                self.strike("prefill", FAULTY / 4)
                try:
                    yield next(slices)
                except StopIteration as finished:
                    return finished.value

        return wrapped

    def _processors(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(request: GenerationRequest) -> Any:
            if self._rng.random() > FAULTY / 2:
                return work(request)
            return [*work(request), self._failing(self._rng.randrange(2 * ANSWER))]

        return wrapped

    def _failing(self, calls: int) -> Callable[[mx.array, mx.array], mx.array]:
        left = iter(range(calls))

        def process(_: mx.array, logits: mx.array) -> mx.array:
            if next(left, None) is None:
                self.strike("processor", 1.0)
            return logits

        return process


@dataclass
class Ticket:
    """One request and what came back."""

    request: GenerationRequest
    cancel_after: int | None  # events; None: never
    handle: RequestHandle | None = None
    tokens: list[int] = field(default_factory=list)
    events: int = 0
    last: Finished | Failed | None = None
    ends: int = 0

    def on_event(self, event: Event) -> None:
        self.events += 1
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
        if isinstance(event, (Finished, Failed)):
            self.last = event
            self.ends += 1
        if self.events == self.cancel_after and self.handle is not None:
            self.handle.cancel()


class Crowd:
    """Keeps a changing number of requests in flight."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.tickets: list[Ticket] = []
        self._ended = threading.Condition()
        self._flying = 0

    def run(self, pool: list[GenerationRequest], count: int) -> None:
        limit = 4
        for number in range(count):
            if number % 10 == 0:
                limit = self.rng.randint(4, 16)
            with self._ended:
                assert self._ended.wait_for(lambda limit=limit: self._flying < limit, 60), "a request hangs"
            self._submit(self._next(pool))
        with self._ended:
            assert self._ended.wait_for(lambda: self._flying == 0, 60), "a request hangs"

    def _next(self, pool: list[GenerationRequest]) -> GenerationRequest:
        """One of the pool, or the next turn of one that was answered."""
        answered = [ticket for ticket in self.tickets[-16:] if isinstance(ticket.last, Finished)]
        request = self.rng.choice(pool)
        if answered and self.rng.random() < FOLLOWED:
            before = self.rng.choice(answered)
            more = random_prompt(self.rng.randint(5, 60), self.rng.randrange(1 << 30))
            prompt = (*before.request.prompt, *before.tokens, *more)
            if len(prompt) < 900:
                request = dataclasses.replace(before.request, prompt=prompt, spans=())
        mode = self.rng.choice((None, True, False))
        return dataclasses.replace(request, specprefill=SpecPrefillOptions(mode, return_spans=True))

    def _submit(self, request: GenerationRequest) -> None:
        cancelled = self.rng.random() < CANCELLED
        ticket = Ticket(request, self.rng.randrange(20) if cancelled else None)
        self.tickets.append(ticket)
        with self._ended:
            self._flying += 1

        def on_event(event: Event) -> None:
            ticket.on_event(event)
            if isinstance(event, (Finished, Failed)):
                with self._ended:
                    self._flying -= 1
                    self._ended.notify_all()

        ticket.handle = self.engine.submit(request, on_event)
        if ticket.cancel_after == 0:
            ticket.handle.cancel()


class References:
    """The greedy answer of the plain model that saw exactly the kept tokens, alone; computed once per prompt."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        self._known: dict[Any, tuple[list[int], list[float]]] = {}

    def check(self, ticket: Ticket, report: PrefillReport) -> None:
        """Check that the answer is the beginning of the right one, as far as that is clear."""
        if report.recalled_tokens:
            return  # what the session held had not seen what was recalled
        prompt = tuple(ticket.request.prompt.tolist())
        key = (prompt, report.kept_spans if report.mode == "sparse" else None)
        if key not in self._known:
            self._known[key] = self._answer(*key)
        tokens, margins = self._known[key]
        clear = next((i for i, margin in enumerate(margins) if margin < CLEAR), ANSWER)
        assert ticket.tokens[:clear] == tokens[: min(clear, len(ticket.tokens))], report

    def _answer(self, prompt: tuple[int, ...], spans: Any) -> tuple[list[int], list[float]]:
        model = self._pair.target
        if spans is None:
            cache = make_prompt_cache(model)
            logits = model(mx.array(prompt)[None], cache=cache)[:, -1]
        else:
            kept = np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in spans])
            cache = make_positioned_cache(model)
            logits = finish(prefill(model, cache, prompt, kept, 2048))
        tokens, margins = [], []
        for _ in range(ANSWER):
            best = np.sort(np.array(logits.astype(mx.float32))[0])
            tokens.append(int(mx.argmax(logits[0]).item()))
            margins.append(float(best[-1] - best[-2]))
            logits = model(mx.array([[tokens[-1]]]), cache=cache)[:, -1]
        return tokens, margins


def pool_of(rng: random.Random) -> list[GenerationRequest]:
    """Short and long prompts; some begin with the same system message."""
    system = random_prompt(140, 1)
    requests = []
    for number in range(24):
        if number % 3 == 0:
            prompt, spans = random_prompt(rng.randint(1, 100), number), ()
        elif number % 3 == 1:
            prompt, spans = random_prompt(rng.randint(160, 700), number), ()
        else:
            prompt = (*system, *random_prompt(rng.randint(20, 400), number))
            M = len(prompt)
            spans = (PromptSpan("system", 0, 2, 139, 140), PromptSpan("user", 140, 142, M - 3, M - 2))
        requests.append(GenerationRequest(prompt, ANSWER, spans=spans))
    return requests


def settled(engine: Engine) -> bool:
    """Wait until background work is over too."""
    end = time.monotonic() + 60
    while engine.loop.jobs or engine.densifier.turns or not engine.scheduler.idle:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def resident() -> int:
    """Bytes of this process in RAM; 0 where the system has no /proc."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def frees(engine: Engine) -> bool:
    """Return whether nothing is reserved any more, once the draft has read what it reads in idle time."""
    return eventually(lambda: engine.memory.reserved == 0)


def counted_bytes(engine: Engine) -> int:
    caches = engine.caches
    return caches._target.nbytes + caches._draft.nbytes


def check_solo_selection(pair: ModelPair, tickets: list[Ticket]) -> None:
    """Without anything to reuse, what was kept is what this request keeps alone."""
    alone = dataclasses.replace(CONFIG, prefix_cache_bytes=0)
    seen: set[tuple[int, ...]] = set()
    with Engine(pair, alone) as engine:
        for ticket in tickets:
            report = ticket.last.report
            fresh = report.mode == "sparse" and report.cached_tokens == 0
            if not fresh or not ticket.tokens or len(seen) >= 12 or tuple(ticket.request.prompt.tolist()) in seen:
                continue
            last = list(engine.generate(ticket.request))[-1]
            assert isinstance(last, Finished)
            seen.add(tuple(ticket.request.prompt.tolist()))
            assert report.kept_spans == last.report.kept_spans
    assert seen


@pytest.fixture
def unheard() -> Iterator[None]:
    """pytest keeps log records, they hold tracebacks, and those the arrays of the frames that failed."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@SEVERAL
@pytest.mark.nightly
def test_soak(family: str, unheard: None) -> None:
    rng = random.Random(f"soak {family}")
    pair, faults = tiny_pair(family), Faults(random.Random(7))
    references = References(pair)
    pool = pool_of(rng)
    count = max(30, REQUESTS // len(FAMILIES))
    references._answer(tuple(pool[1].prompt.tolist()), None)
    gc.collect()
    memory = mx.get_active_memory()
    engine = Engine(pair, CONFIG)
    crowd = Crowd(engine, rng)
    with engine, faults.everywhere():
        before = unaccounted(engine)  # of tests before this one
        crowd.run(pool, count // 2)
        halfway = resident()
        assert settled(engine)
        half = unaccounted(engine)
        crowd.run(pool, count - count // 2)
        assert settled(engine)
        # Without a collection: the server has none either. Half a MiB is usual, 1.1 was seen on a busy machine; it is
        # there after the first half, so the second one adds next to nothing.
        assert unaccounted(engine) < min(before + (2 << 20), half + (1 << 20))
        assert engine.health().alive
        assert frees(engine)
        assert len(engine.rows) == 0
    assert engine.health().running == engine.health().queued == 0
    ends = Counter(_ending(ticket) for ticket in crowd.tickets)
    assert ends["length"] > count / 3
    assert ends["cancelled"] > 0
    for ticket in crowd.tickets:
        assert ticket.ends == 1
        if isinstance(ticket.last, Finished) and ticket.tokens:
            references.check(ticket, ticket.last.report)
    assert faults.raised.total() > 0
    check_solo_selection(pair, crowd.tickets)
    assert engine.caches.budget.used == counted_bytes(engine) > 0
    engine.caches.clear()
    assert engine.caches.budget.used == engine.caches.budget.shared == 0
    print(family, dict(ends), dict(faults.raised), dict(engine.prefiller.fallbacks), engine.stats().densified)
    del engine, crowd, ticket
    gc.collect()
    assert mx.get_active_memory() <= 1.05 * memory
    assert resident() <= halfway + (128 << 20)


def _ending(ticket: Ticket) -> str:
    """Length or cancelled; a failure is one of ours, and only of those that can't be made good."""
    if isinstance(ticket.last, Failed):
        assert isinstance(ticket.last.error, Injected), ticket.last.error
        assert str(ticket.last.error) in ("prefill", "processor")
        return "failed"
    assert ticket.last.reason == "cancelled" or len(ticket.tokens) == ANSWER
    return ticket.last.reason


def test_a_first_choice_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that raises on the prompt's own logits, before the row is in the batch."""
    request = GenerationRequest(random_prompt(30), 3)

    def failing(_: Any) -> list[Any]:
        def process(history: mx.array, logits: mx.array) -> mx.array:
            raise Injected("processor")

        return [process]

    with Engine(tiny_pair(), CONFIG) as engine:
        expected = [event for event in engine.generate(request) if isinstance(event, TokenEvent)]
        with monkeypatch.context() as patch:
            patch.setattr(rows, "processors_of", failing)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Injected)
        assert [event for event in engine.generate(request) if isinstance(event, TokenEvent)] == expected


def test_a_first_token_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row goes on to its last token, and no row is left behind."""
    request, read = GenerationRequest(random_prompt(30), 3), DecodeBatch.first_token
    long, events = GenerationRequest(random_prompt(20, 1), 200), queue.SimpleQueue[Any]()
    with Engine(tiny_pair(), CONFIG) as engine:
        engine.submit(long, events.put)
        while not isinstance(events.get(timeout=60), TokenEvent):
            pass

        def failing(self: DecodeBatch) -> TokenEvent:
            read(self)
            raise Injected("first token")

        with monkeypatch.context() as patch:
            patch.setattr(DecodeBatch, "first_token", failing)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Injected)
        while isinstance(ending := events.get(timeout=60), TokenEvent):
            pass
        assert isinstance(ending, Finished)
        assert ending.completion_tokens == 200
        assert frees(engine)


def test_a_fault_of_the_engine_itself_ends_what_runs_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    request = GenerationRequest(random_prompt(30), 3)
    with Engine(tiny_pair(), CONFIG) as engine:

        def broken(*_: Any) -> None:
            raise Injected("scheduler")

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "record", broken)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(list(engine.generate(request))[-1], Finished)
        assert frees(engine)
