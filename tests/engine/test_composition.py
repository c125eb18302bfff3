"""Prefix cache, sparse prefill and sessions together: what is reused, and that reuse changes no answer."""

from __future__ import annotations

import dataclasses
import threading
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    Progress,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from tests.support.leaving import events_until, read_in
from tests.support.tiny import FAMILIES, generated, greedy, random_prompt, tiny_pair
from tests.support.waiting import eventually

POLICY = SpecPrefillPolicy(threshold=200, keep_pct=Fraction(3, 10), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=128, prefix_cache_bytes=64 << 20)
OFF = SpecPrefillOptions(False)
AUTO = SpecPrefillOptions(None, None, return_spans=True)


def chat(*lengths, seed=0):
    """A prompt of user messages with headers of 2 and ends of 1, and a generation prompt of 2."""
    M = sum(lengths) + 3 * len(lengths) + 2
    spans, at = [], 0
    for length in lengths:
        spans.append(PromptSpan("user", at, at + 2, at + 2 + length, at + 3 + length))
        at = spans[-1].end
    return random_prompt(M, seed), tuple(spans)


def ask(engine, prompt, spans=(), tokens=6, options=AUTO):
    return generated(engine.generate(GenerationRequest(tuple(prompt), tokens, specprefill=options, spans=spans)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_identical_request_feeds_one_token_and_answers_the_same(family):
    pair, prompt = tiny_pair(family), random_prompt(150)
    with Engine(pair, CONFIG) as engine:
        first, cold = ask(engine, prompt)
        second, warm = ask(engine, prompt)
    assert cold.report.cached_tokens == 0
    assert first == second == greedy(pair.target, prompt, 6)
    assert warm.report.cached_tokens == 149


@pytest.mark.parametrize("family", FAMILIES)
def test_state_that_cannot_be_trimmed_is_kept_at_message_boundaries(family):
    """A second conversation with the same first message starts after it."""
    pair = tiny_pair(family)
    (first, spans), (other, _) = chat(90, 50), chat(90, 50, seed=5)
    shared = (*first[: spans[0].end], *other[spans[0].end :])
    with Engine(pair, CONFIG) as engine:
        ask(engine, first, spans)
        tokens, last = ask(engine, shared, spans)
    assert last.report.cached_tokens == spans[0].end
    assert tokens == greedy(pair.target, shared, 6)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sparse_prefill_of_the_suffix_only(family):
    """Everything kept lies in [S, M), the threshold looks at M - S, the answer is that of a masked dense run."""
    pair = tiny_pair(family)
    prompt, spans = chat(150, 400)
    S = spans[0].end
    with Engine(pair, CONFIG) as engine:
        ask(engine, prompt[:S], spans[:1], tokens=1)
        tokens, last = ask(engine, prompt, spans)
    report = last.report
    assert (report.mode, report.cached_tokens) == ("sparse", S)
    assert report.kept_spans[0][0] == 0
    assert report.kept_spans[0][1] >= S
    kept = np.concatenate([np.arange(a, b) for a, b in report.kept_spans])
    assert kept.size == report.kept_tokens
    assert S + 0.3 * (len(prompt) - S) <= kept.size < len(prompt)
    assert tokens == masked_greedy(pair.target, prompt, kept, 6)


def masked_greedy(model, prompt, kept, count, turns=None):
    """Greedy decoding of an attention-only model whose dropped prompt tokens nobody sees.

    `turns` (M,) says when each prompt token was fed; earlier ones don't see later ones.
    """
    seen, tokens = np.isin(np.arange(len(prompt)), kept), list(prompt)
    fed = np.zeros(len(prompt), dtype=int) if turns is None else turns
    original = mx.fast.scaled_dot_product_attention

    def masked(q, k, v, *, scale, mask=None, **_):
        L = q.shape[2]
        visible = np.concatenate([seen, np.ones(L - seen.size, dtype=bool)])
        when = np.concatenate([fed, np.full(L - seen.size, fed.max())])
        there = visible[None] & (when[None] <= when[:, None])
        allowed = np.tril(np.ones((L, L), dtype=bool)) & (there | np.eye(L, dtype=bool))
        return original(q, k, v, scale=scale, mask=mx.array(allowed))

    mx.fast.scaled_dot_product_attention = masked
    try:
        for _ in range(count):
            tokens.append(int(mx.argmax(model(mx.array(tokens)[None])[0, -1]).item()))
    finally:
        mx.fast.scaled_dot_product_attention = original
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.extended
def test_densified_in_idle_time_the_next_turn_is_an_ordinary_hit(family):
    pair = tiny_pair(family)
    prompt, spans = chat(600)
    config = dataclasses.replace(CONFIG, policy=dataclasses.replace(POLICY, densify=True))
    with Engine(pair, config) as engine:
        answer, first = ask(engine, prompt, spans)
        assert first.report.mode == "sparse"
        more = (*prompt, *answer, *random_prompt(30, 4))
        assert eventually(lambda: engine.stats().densified == 1)
        tokens, last = ask(engine, more)
    assert last.report.mode == "full"
    assert last.report.cached_tokens >= len(prompt)
    assert tokens == greedy(pair.target, more, 6)


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cancelled_prefill_goes_on_where_it_stopped(family):
    pair, prompt = tiny_pair(family), random_prompt(700)
    with Engine(pair, CONFIG) as engine:
        request = GenerationRequest(prompt, 4, specprefill=OFF)
        events = events_until(engine, request, lambda event: 384 in read_in("prefill", [event]))
        tokens, last = ask(engine, prompt, options=OFF)
    assert read_in("prefill", events) == [128, 256, 384]
    assert last.report.cached_tokens == 384
    assert tokens == greedy(pair.target, prompt, 6)


def test_a_cancelled_draft_prefill_goes_on_where_it_stopped():
    pair, (prompt, _) = tiny_pair(), chat(700)
    config = dataclasses.replace(CONFIG, scoring=dataclasses.replace(CONFIG.scoring, prefill_step=128))
    with Engine(pair, config) as engine:
        request = GenerationRequest(prompt, 4, specprefill=AUTO)
        events = events_until(engine, request, lambda event: 256 in read_in("draft", [event]))
        starts = read_in("draft", list(engine.generate(GenerationRequest(prompt, 2))))
    assert read_in("draft", events) == [128, 256]
    assert starts[0] > 256


def test_answers_run_while_a_long_prompt_is_read():
    """A running answer gets a token between any two slices of somebody else's prefill that take their time."""
    order, done = [], threading.Event()
    impatient = dataclasses.replace(CONFIG, prefix_cache_bytes=0, target_itl_ms=1e-3)
    with Engine(tiny_pair(), impatient) as engine:
        started = threading.Event()

        def short(event):
            if isinstance(event, TokenEvent):
                order.append("token")
                started.set()

        def long(event):
            if isinstance(event, Progress) and event.stage == "prefill" and event.done:
                order.append("slice")
            if isinstance(event, Finished):
                done.set()

        engine.submit(GenerationRequest(random_prompt(20), 4000, specprefill=OFF), short)
        assert started.wait(60)
        engine.submit(GenerationRequest(random_prompt(2000), 1, specprefill=OFF), long)
        assert done.wait(60)
    text = " ".join(order)
    assert "slice slice" not in text
    assert order.count("slice") >= 8


def test_slices_that_take_next_to_nothing_share_a_tick():
    """Several short prompts are read between two steps of a running answer, so that they join the batch together."""
    order, ended = [], threading.Semaphore(0)
    patient = dataclasses.replace(CONFIG, prefix_cache_bytes=0, target_itl_ms=1e6)

    def on_event(event):
        order.append(type(event).__name__)
        if isinstance(event, Finished):
            ended.release()

    with Engine(tiny_pair(), patient) as engine:
        posted = threading.Event()  # the engine waits, or it would answer the first before the last is there
        engine.submit(GenerationRequest(random_prompt(20, 99), 1, specprefill=OFF), lambda _: posted.wait(60))
        for seed in range(4):
            engine.submit(GenerationRequest(random_prompt(20, seed), 6, specprefill=OFF), on_event)
        posted.set()
        for _ in range(4):
            assert ended.acquire(timeout=60)
    assert order[-8:] == ["TokenEvent", "Finished"] * 4  # of one step: they have joined together
