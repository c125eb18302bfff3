"""The MLX thread: order, cancellation, refusal, reports."""

from __future__ import annotations

import threading
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    ContextLengthError,
    Engine,
    EngineClosedError,
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    InvalidRequestError,
    Progress,
    PromptLogprobs,
    SamplingParams,
    SelectionConfig,
    SparseUnsupportedError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    make_pair,
)
from tests.support.leaving import events_until, read_in
from tests.support.tiny import FAMILIES, VOCAB, generated, greedy, random_prompt, tiny_model, tiny_pair, tokenizer
from tests.support.waiting import eventually

M = 300
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100), prefill_step=64)
SPARSE, FULL = SpecPrefillOptions(True, Fraction(1, 5)), SpecPrefillOptions(False)


def request(tokens=8, options=SPARSE, length=M, seed=0, **more):
    """A prompt that was read before is not scored again: another `seed` gives another one."""
    return GenerationRequest(random_prompt(length, seed), tokens, specprefill=options, **more)


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_pair(), CONFIG) as running:
        yield running


@pytest.mark.parametrize("family", FAMILIES)
def test_full_mode_is_plain_greedy_decoding(family):
    pair = tiny_pair(family)
    with Engine(pair, CONFIG) as engine:
        tokens, last = generated(engine.generate(request(options=FULL, length=60)))
    assert tokens == greedy(pair.target, random_prompt(60), 8)
    assert last.reason == "length"


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_mode_keeps_the_budget_and_repeats_itself(family):
    pair = tiny_pair(family)
    assert pair.sparse_refusal is None
    with Engine(pair, CONFIG) as engine:
        first, last = generated(engine.generate(request()))
        second, _ = generated(engine.generate(request()))
    report = last.report
    assert (report.mode, report.reason) == ("sparse", "requested")
    assert first == second
    assert report.prompt_tokens == M
    assert 0.2 <= report.kept_share < 0.4
    assert report.kept_tokens == round(report.kept_share * M)


def test_events_come_in_order(engine):
    events = list(engine.generate(request()))
    stages = [event.stage for event in events if isinstance(event, Progress)]
    assert stages == sorted(stages, key=["queued", "draft", "select", "prefill"].index)
    assert {"queued", "draft", "select", "prefill"} == set(stages)
    first_token = next(i for i, event in enumerate(events) if isinstance(event, TokenEvent))
    assert all(isinstance(event, TokenEvent) for event in events[first_token:-1])
    assert isinstance(events[-1], Finished)
    assert events[-1].completion_tokens == 8
    for done, total in [(e.done, e.total) for e in events if isinstance(e, Progress)]:
        assert 0 <= done <= total


def test_timings_are_of_this_request(engine):
    _, last = generated(engine.generate(request(seed=1)))
    times = last.report.timings
    assert times.draft_ms > 0
    assert times.prefill_ms > 0
    assert times.ttft_ms >= times.draft_ms + times.select_ms + times.prefill_ms
    _, full = generated(engine.generate(request(options=FULL)))
    assert full.report.timings.draft_ms == 0


def test_a_stop_token_ends_the_answer(engine):
    free, _ = generated(engine.generate(request()))
    stop = free[3]
    tokens, last = generated(engine.generate(request(stop_token_ids=frozenset([stop]))))
    assert last.reason == "stop"
    assert tokens == free[: free.index(stop) + 1]


def test_cancel_while_decoding(engine):
    tokens = []

    def leaves(event):
        tokens.extend([event] if isinstance(event, TokenEvent) else [])
        return len(tokens) == 3

    *_, last = events_until(engine, request(tokens=500), leaves)
    assert last.reason == "cancelled"
    assert len(tokens) == 3
    assert last.report.mode == "sparse"


@pytest.mark.parametrize("stage", ["draft", "prefill"])
def test_cancel_in_prefill_is_not_a_fallback(engine, stage):
    before = dict(engine.prefiller.fallbacks)
    asked = request(tokens=50, seed=len(stage))
    events = events_until(engine, asked, lambda event: isinstance(event, Progress) and event.stage == stage)
    assert events[-1].reason == "cancelled"
    assert sum(isinstance(e, Progress) and e.stage == stage for e in events) == 1
    assert not any(isinstance(e, TokenEvent) for e in events)
    assert dict(engine.prefiller.fallbacks) == before


@pytest.mark.parametrize(("options", "stage"), [(SPARSE, "draft"), (SPARSE, "prefill"), (FULL, "prefill")])
def test_a_request_that_is_given_up_says_how_far_it_came(engine, options, stage):
    """It has no time to a first token, and what it kept is what was read."""
    asked = request(tokens=4, options=options, seed=70 + len(stage))
    events = events_until(engine, asked, lambda event: bool(read_in(stage, [event])))
    report, tokens = events[-1].report, read_in(stage, events)[-1]
    assert report.timings.ttft_ms is None
    assert report.to_dict()["timings"]["ttft_ms"] is None
    assert report.reached == (stage, tokens)
    assert report.to_dict()["reached"] == {"stage": stage, "tokens": tokens}
    assert report.kept_tokens == (tokens if stage == "prefill" else 0) < report.prompt_tokens
    assert report.kept_share is None


def test_cancel_while_queued(engine):
    release, running, order = threading.Event(), threading.Event(), []

    def block(event):
        running.set()
        release.wait(60)

    engine.submit(request(tokens=2), block)
    assert running.wait(60)
    done = threading.Event()
    handle = engine.submit(request(), lambda e: (order.append(e), done.set() if isinstance(e, Finished) else None))
    assert engine.health().queued == 1
    handle.cancel()
    release.set()
    assert done.wait(60)
    assert order[-1].reason == "cancelled"
    assert not any(isinstance(e, TokenEvent) for e in order)


def test_a_callback_that_raises_ends_its_own_request_only(engine):
    def broken(event):
        raise ValueError("callback")

    engine.submit(request(), broken)
    tokens, _ = generated(engine.generate(request()))
    assert len(tokens) == 8
    assert engine.health().running == 0


def test_the_queue_is_bounded():
    release = threading.Event()
    with Engine(tiny_pair(), EngineConfig(max_queue=2)) as engine:
        running = threading.Event()
        engine.submit(request(tokens=2), lambda e: (running.set(), release.wait(60)))
        assert running.wait(60)
        engine.submit(request(), lambda e: None)
        engine.submit(request(), lambda e: None)
        with pytest.raises(EngineClosedError, match="2 requests are waiting"):
            engine.submit(request(), lambda e: None)
        release.set()


def test_close_ends_every_request_and_refuses_new_ones():
    engine = Engine(tiny_pair(), CONFIG)
    engine.start()
    lasts, running = [], threading.Event()

    def on_event(event):
        running.set()
        if isinstance(event, (Finished, Failed)):
            lasts.append(event)

    for _ in range(3):
        engine.submit(request(tokens=2000), on_event)
    assert running.wait(60)
    engine.close()
    assert [event.reason for event in lasts] == ["cancelled"] * 3
    assert not engine.health().alive
    with pytest.raises(EngineClosedError):
        engine.submit(request(), on_event)
    with pytest.raises(EngineClosedError):
        engine.start()


def test_health_beats_while_idle(engine):
    before = engine.loop.beat
    assert eventually(lambda: engine.loop.beat > before)
    health = engine.health()
    assert health.alive
    assert (health.running, health.queued) == (0, 0)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"length": 0}, "prompt"),
        ({"tokens": -1}, "max_tokens"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=1.5)}, "top_p"),
        ({"sampling": SamplingParams(top_k=-1)}, "top_k"),
        ({"sampling": SamplingParams(min_p=2)}, "min_p"),
        ({"sampling": SamplingParams(repetition_penalty=0)}, "repetition_penalty"),
        ({"sampling": SamplingParams(presence_penalty=3)}, "presence_penalty"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_bad_requests_are_refused_before_any_work(engine, bad, field):
    with pytest.raises(InvalidRequestError) as raised:
        engine.submit(request(**bad), lambda e: None)
    assert raised.value.field == field


def test_token_ids_outside_the_vocabulary_are_refused(engine):
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.submit(GenerationRequest((3, VOCAB), 4), lambda e: None)


def test_a_prompt_that_leaves_no_room_is_refused():
    with Engine(tiny_pair(context=310), CONFIG) as engine:
        with pytest.raises(ContextLengthError, match="maximum context length is 310 tokens"):
            engine.submit(request(tokens=11), lambda e: None)
        assert len(generated(engine.generate(request(tokens=10)))[0]) == 10


def test_no_draft_means_full_prefill_with_the_reason():
    pair = make_pair(tiny_model("llama"), tokenizer(), {"max_position_embeddings": 4096, "vocab_size": VOCAB})
    with Engine(pair, CONFIG) as engine:
        _, last = generated(engine.generate(request()))
        assert (last.report.mode, last.report.reason) == ("full", "no draft model is loaded")
        with pytest.raises(SparseUnsupportedError):
            engine.inspect(request())


def test_inspection_agrees_with_generation(engine):
    options = SpecPrefillOptions(True, Fraction(1, 5), return_spans=True)
    _, last = generated(engine.generate(request(options=options)))
    inspection = engine.inspect(request(options=options))
    assert inspection.kept_tokens == last.report.kept_tokens
    assert sum(chunk.kept_tokens for chunk in inspection.chunks) == last.report.kept_tokens
    assert inspection.importance.shape == (M,)
    assert [chunk.start for chunk in inspection.chunks] == list(range(0, M, SelectionConfig().chunk_size))
    assert inspection.chunks[-1].end == M
    assert any(reason == "last prompt token" for _, _, reason in inspection.forced_ranges)


@pytest.mark.parametrize("length", [150, 129, 128, 1])  # 128 at a time; the last row has no token to follow
def test_prompt_logprobs_are_those_of_a_dense_forward(engine, length):
    prompt = random_prompt(length)
    events = list(engine.generate(GenerationRequest(prompt, 0, prompt_logprobs=2, specprefill=SPARSE)))
    (echoed,) = [event for event in events if isinstance(event, PromptLogprobs)]
    logits = engine.pair.target(mx.array(prompt)[None])[0].astype(mx.float32)
    table = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    assert len(echoed.entries) == length - 1
    for i, (own, best) in enumerate(echoed.entries):
        assert own.token == prompt[i + 1]
        assert own.logprob == pytest.approx(table[i, own.token], abs=1e-4)
        assert best[0].logprob == pytest.approx(table[i].max(), abs=1e-4)
        assert len(best) == 2
    assert events[-1].report.mode == "full"
    assert events[-1].completion_tokens == 0
