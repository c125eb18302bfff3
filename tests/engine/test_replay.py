"""Teacher forcing: the same distributions that decoding draws from, after both kinds of prefill."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    InvalidRequestError,
    PromptSpan,
    ScoringConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.engine.requests.active_request import ActiveRequest
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support.precision import assert_close
from tests.support.tiny import FAMILIES, generated, random_prompt, tiny_pair

M, T = 300, 12
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100), prefill_step=64)
SPARSE, FULL = SpecPrefillOptions(True, Fraction(1, 5), return_spans=True), SpecPrefillOptions(False)


def request(options, **more):
    return GenerationRequest(random_prompt(M), T, specprefill=options, **more)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [SPARSE, FULL], ids=["sparse", "full"])
def test_replaying_an_answer_gives_its_own_log_probabilities(family, options):
    with Engine(tiny_pair(family), CONFIG) as engine:
        events = [e for e in engine.generate(request(options, logprobs=0)) if hasattr(e, "token")]
        answer = [event.token for event in events]
        replay = engine.replay(request(options), answer)
    assert replay.logprobs.shape == (len(answer), engine.pair.vocab_size)
    assert replay.logprobs.argmax(axis=1).tolist() == answer
    told = [event.logprob for event in events]
    assert_close(replay.logprobs[np.arange(len(answer)), answer], told, atol=1e-4)
    assert replay.report.mode == ("sparse" if options is SPARSE else "full")


def prefilled(engine, asked):
    """The target's cache after the engine's own prefill, and the last token's logits."""
    active = ActiveRequest(-1, asked, engine.prefiller.planner.plan(asked))
    slices = engine.prefiller.run(active)
    while True:
        try:
            next(slices)
        except StopIteration as finished:
            return active.cache, finished.value


def test_the_callers_own_importance_decides_what_is_kept():
    importance = np.zeros(M, dtype=np.float32)
    importance[96:104] = 1  # one whole chunk
    options = replace(SPARSE, keep_pct=Fraction(1, 10), importance=importance)
    with Engine(tiny_pair(), CONFIG) as engine:
        _, last = generated(engine.generate(request(options)))
        assert last.report.mode == "sparse"
        assert any(start <= 96 and end >= 104 for start, end in last.report.kept_spans)
        for bad in (importance[:-1], np.full(M, np.nan, dtype=np.float32)):
            with pytest.raises(InvalidRequestError, match="one finite number per prompt token"):
                engine.submit(request(replace(SPARSE, importance=bad)), print)


def test_the_drafts_importance_given_back_selects_the_same():
    with Engine(tiny_pair(), CONFIG) as engine:
        scored = engine.inspect(request(SPARSE)).importance
        asked = [generated(engine.generate(request(o))) for o in (SPARSE, replace(SPARSE, importance=scored))]
    assert asked[0][0] == asked[1][0]
    assert asked[0][1].report.kept_spans == asked[1][1].report.kept_spans


def test_scoring_by_the_papers_rule_equals_brute_force():
    """One query row (the last prompt token) and no pooling: the importance is the attention row itself, joined."""
    pair = tiny_pair("llama")
    config = EngineConfig(scoring=ScoringConfig(1, pool_width=1), prefill_step=64)
    with Engine(pair, config) as engine:
        importance = engine.inspect(request(SPARSE)).importance
    rows = attention_rows(pair.draft, random_prompt(M), M)[:, 0]
    assert_close(importance, rows.max(axis=0), atol=1e-5)


def with_two_heads(pair):
    return replace(pair, heads=DraftHeads((Head(0, 1, 0.5), Head(2, 0, 0.5)), 3, 3, {}))


def test_template_and_question_get_no_importance():
    spans = (PromptSpan("user", 0, 4, M - 6, M - 4),)
    config = EngineConfig(scoring=ScoringConfig(question_rows=(8, 8), pool_width=1), prefill_step=64)
    with Engine(with_two_heads(tiny_pair("llama")), config) as engine:
        importance = engine.inspect(replace(request(SPARSE), spans=spans)).importance
    frame = [*range(4), *range(M - 14, M)]
    assert np.flatnonzero(importance == 0).tolist() == frame


def test_where_nobody_says_anything_nothing_is_a_matter_of_choice():
    empty = replace(request(SPARSE), prompt=random_prompt(9), spans=(PromptSpan("user", 0, 4, 4, 6),))
    with Engine(with_two_heads(tiny_pair("llama")), CONFIG) as engine:
        inspection = engine.inspect(empty)
        answer, last = generated(engine.generate(empty))
    assert not inspection.importance.any()
    assert inspection.kept_tokens == 9
    assert len(answer) == T
    assert last.report.mode == "full"


def attention_rows(model, tokens, prompt_len, rows=1):
    """(layers * heads, rows, prompt_len): the last tokens' attention over the first ones, in one dense forward."""
    seen = []
    inner = mx.fast.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        repeated = mx.repeat(k, q.shape[1] // k.shape[1], axis=1)[..., :prompt_len, :]
        logits = (q[:, :, -rows:] * kwargs["scale"]) @ repeated.swapaxes(-1, -2)
        seen.append(np.array(mx.softmax(logits.astype(mx.float32), axis=-1))[0])
        return inner(q, k, v, **kwargs)

    mx.fast.scaled_dot_product_attention = spy
    try:
        mx.eval(model(mx.array([list(tokens)])))
    finally:
        mx.fast.scaled_dot_product_attention = inner
    return np.concatenate(seen)
