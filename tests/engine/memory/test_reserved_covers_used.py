"""Memory as MLX counts it, beside what was reserved and the limit: at every tick, over random requests."""

from __future__ import annotations

import gc
import queue
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    ContextLengthError,
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    ModelPair,
    PromptLogprobs,
    PromptSpan,
    RequestHandle,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationName,
    TokenEvent,
    make_pair,
)
from mlx_specprefill.engine.memory import reservations
from mlx_specprefill.engine.thread import loop
from tests.support import precision
from tests.support.tiny import random_prompt, tiny_model, tokenizer
from tests.support.waiting import eventually

WORDS = 4000
STEP = 64
OFF = SpecPrefillOptions(False)
SMALL = 2 << 20  # bytes: tables, masks, and what MLX rounds up
CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=300, densify=False), prefill_step=STEP, prefix_cache_bytes=2 << 30, max_rows=1
)


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """Keys and values take most of the memory, then the logits."""
    wide = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": WORDS, "head_dim": 64}
    config = {"max_position_embeddings": 8192, "vocab_size": WORDS}
    target, draft = (tiny_model("llama", layers, num_hidden_layers=layers, **wide) for layers in (8, 4))
    return make_pair(target, tokenizer(WORDS), config, draft=draft, draft_config=config)


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    gc.collect()
    mx.clear_cache()


def need_of(pair: ModelPair, request: GenerationRequest) -> tuple[int, int, int]:
    """The bytes of the weights, of a request, and of the forward of a chunk behind a long prompt."""
    with Engine(pair, CONFIG) as engine:
        working = engine.memory._target.working(4000, STEP)
        return engine.memory.weights, engine.memory.need(request, "full").total, working


class Accountant:
    """The highest peak of any tick, in bytes beside what other tests hold."""

    def __init__(self, engine: Engine) -> None:
        self.peak = 0
        self._foreign = mx.get_active_memory() - engine.memory.weights
        self._step = engine.loop.step
        engine._inbox.call(lambda: setattr(engine.loop, "step", self.step))

    def step(self, *how: Any, **more: Any) -> None:
        mx.reset_peak_memory()
        self._step(*how, **more)
        self.peak = max(self.peak, mx.get_peak_memory() - self._foreign)


class Asked:
    """A request in work."""

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.last: Event | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.handle: RequestHandle = engine.submit(request, self._events.put)

    def look(self, timeout: float = 60) -> Event:
        event = self._events.get(timeout=timeout)
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
        if hasattr(event, "report"):
            self.last = event
        return event

    def until_tokens(self, count: int) -> Asked:
        while len(self.tokens) < count and self.last is None:
            self.look()
        return self

    def until_end(self) -> Asked:
        while self.last is None:
            self.look()
        return self


def random_request(rng: random.Random, texts: list[tuple[int, ...]]) -> GenerationRequest:
    before = rng.choice(texts) if texts and rng.random() < 0.5 else ()
    new = rng.choice([5, 100, 400, 700])
    prompt = (*before, *(rng.randrange(10, WORDS) for _ in range(new)))[:900]
    options = SpecPrefillOptions(
        rng.choice([None, True, False]),
        speculative=rng.choice([None, "draft", "ngram", "triforce"]),
        rule=rng.choice([None, None, "paper"]),
    )
    return GenerationRequest(
        prompt,
        rng.choice([1, 5, 20]),
        specprefill=options,
        logprobs=rng.choice([None, 3]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        spans=(PromptSpan("user", 0, 0, len(prompt), len(prompt)),),
    )


def random_history(engine: Engine, rng: random.Random, count: int) -> Iterator[Event | None]:
    """Ask, in turns with three others, and yield how each ended."""
    live, texts = list[Asked](), list[tuple[int, ...]]()
    while count or live:
        while count and len(live) < 3:
            count -= 1
            try:
                live.append(Asked(engine, random_request(rng, texts)))
            except ContextLengthError:
                continue
        if not live:
            continue
        first = live.pop(0)
        if rng.random() < 0.15:
            first.until_tokens(3).handle.cancel()
        yield first.until_end().last
        texts.append((*first.request.prompt.tolist(), *first.tokens))


@pytest.mark.extended
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 12))])
def test_no_tick_exceeds_the_limit_by_more_than_a_chunks_scratch(pair: ModelPair, seed: int) -> None:
    rng = random.Random(seed)
    weights, need, scratch = need_of(pair, GenerationRequest(random_prompt(900), 20, specprefill=OFF))
    limit = weights + int(rng.choice([1.2, 1.6, 2.5, 4.0]) * need)
    with Engine(pair, replace(CONFIG, memory_limit=limit)) as engine:
        accountant = Accountant(engine)
        ends = list(random_history(engine, rng, 12))
        assert eventually(lambda: engine.memory.reserved == 0)
        assert engine.caches.budget.used == engine.caches.nbytes
    assert sum(isinstance(end, Finished) for end in ends) == len(ends) > 6
    assert accountant.peak <= limit + scratch + SMALL


@pytest.mark.extended
def test_all_logits_of_a_prompt_are_reserved(pair: ModelPair) -> None:
    """They are read 128 rows at a time, whatever the chunk."""
    request = GenerationRequest(random_prompt(900), 1, prompt_logprobs=2, specprefill=OFF)
    with Engine(pair, replace(CONFIG, prefill_step=900, prefix_cache_bytes=0)) as engine:
        need = engine.memory.need(request, "full").total
        accountant = Accountant(engine)
        events = list(engine.generate(request))
        assert sum(len(event.entries) for event in events if isinstance(event, PromptLogprobs)) == 899
        assert accountant.peak - engine.memory.weights <= need + SMALL


@pytest.mark.extended
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("strategy", ["draft", "triforce"])
def test_what_proposes_is_reserved(pair: ModelPair, strategy: SpeculationName, enabled: bool) -> None:
    request = GenerationRequest(random_prompt(900), 30, specprefill=SpecPrefillOptions(enabled, speculative=strategy))
    with Engine(pair, replace(CONFIG, prefix_cache_bytes=0)) as engine:
        accountant = Accountant(engine)
        asked = Asked(engine, request).until_tokens(5)
        reserved = engine.stats().memory.reserved
        last = asked.until_end().last
        assert isinstance(last, Finished)
        assert last.report.speculation.strategy == strategy
        assert accountant.peak - engine.memory.weights <= reserved + SMALL


@pytest.mark.extended
def test_an_answer_goes_without_proposals_where_memory_has_no_room_for_them(pair: ModelPair) -> None:
    plain = GenerationRequest(random_prompt(500), 20, specprefill=OFF)
    drafted = replace(plain, specprefill=SpecPrefillOptions(False, speculative="draft"))
    weights, need, _ = need_of(pair, plain)
    with Engine(pair, replace(CONFIG, memory_limit=weights + need + need // 20)) as engine:
        assert engine.memory.need(drafted, "full") == engine.memory.need(plain, "full")
        last = Asked(engine, drafted).until_end().last
    assert isinstance(last, Finished)
    assert "memory has no room" in last.report.speculation.reason


@pytest.mark.extended
def test_a_long_answer_is_reserved_as_it_grows(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission counts a part of what it may have. What is cached gives way to the rest."""
    for module in (loop, reservations):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 100)
    long = GenerationRequest(random_prompt(100), 350, specprefill=OFF)
    weights, need, scratch = need_of(pair, long)
    token = 2 * 8 * 4 * 64 * precision.dtype().size  # bytes
    limit = weights + need + 300 * token
    with Engine(pair, replace(CONFIG, memory_limit=limit)) as engine:
        for seed in range(3):
            Asked(engine, GenerationRequest(random_prompt(100, seed), 5, specprefill=OFF)).until_end()
        accountant, cached = Accountant(engine), engine.caches.nbytes
        asked = Asked(engine, long).until_tokens(50)
        reserved = engine.stats().memory.reserved
        asked.until_tokens(330)
        assert engine.stats().memory.reserved - reserved == 250 * token
        asked.until_end()
        assert engine.caches.nbytes < cached
    assert accountant.peak <= limit + scratch + SMALL


@pytest.mark.extended
def test_prefixes_have_the_room_that_requests_leave(pair: ModelPair) -> None:
    """Beside running requests less of a prefix is stored, and not what the next admission would evict."""
    requests = [GenerationRequest(random_prompt(500, seed), 100, specprefill=OFF) for seed in range(3)]
    weights, need, scratch = need_of(pair, requests[0])
    limit = weights + need + need // 2
    with Engine(pair, replace(CONFIG, memory_limit=limit)) as engine:
        accountant = Accountant(engine)
        for request in requests:
            asked, memory = Asked(engine, request).until_tokens(5), engine.memory
            planned = engine._inbox.call(lambda memory=memory: memory.weights + memory.reserved + memory.cached)
            assert planned <= limit
            assert engine.caches.nbytes > 0
            asked.handle.cancel()
            asked.until_end()
    assert accountant.peak <= limit + scratch + SMALL


@pytest.mark.extended
def test_a_request_that_waits_evicts_nothing(pair: ModelPair) -> None:
    """It would not fit even if the cache were empty, as long as the first one runs."""
    long = [GenerationRequest(random_prompt(400, seed), 400, specprefill=OFF) for seed in (100, 101)]
    weights, need, _ = need_of(pair, long[0])
    with Engine(pair, replace(CONFIG, max_rows=2, memory_limit=weights + need + need // 3)) as engine:
        for seed in range(4):
            Asked(engine, GenerationRequest(random_prompt(200, seed), 5, specprefill=OFF)).until_end()
        first = Asked(engine, long[0]).until_tokens(3)
        before, evictions = engine.caches.nbytes, engine.stats().evictions
        second = Asked(engine, long[1])
        assert eventually(lambda: engine.stats().waiting == 1)
        first.until_tokens(20)
        assert engine.stats().waiting == 1
        assert (engine.caches.nbytes, engine.stats().evictions) == (before, evictions)
        assert before > 0
        for asked in (first, second):
            asked.handle.cancel()
            asked.until_end()
