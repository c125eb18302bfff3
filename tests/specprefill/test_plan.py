"""Sparse or full, and the reason."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mlx_specprefill import EngineConfig, GenerationRequest, PromptSpan, SpecPrefillOptions, SpecPrefillPolicy
from mlx_specprefill.request import Prediction
from mlx_specprefill.specprefill.plan import plan_prefill

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=1000))


def plan(
    M=4000, *, enabled=None, keep=None, refusal=None, config=CONFIG, spans=(), prompt_logprobs=None, wide=None, **facts
):
    request = GenerationRequest(
        (5,) * M,
        8,
        specprefill=SpecPrefillOptions(enabled, keep, scope=wide),
        spans=spans,
        prompt_logprobs=prompt_logprobs,
    )
    return plan_prefill(request, config, sparse_refusal=refusal, **facts)


def test_policy_is_strictly_above_the_threshold():
    assert plan(1000).mode == "full"
    assert plan(1001).mode == "sparse"
    assert "1000" in plan(1000).reason


def test_the_threshold_looks_at_the_uncached_suffix():
    assert plan(4000, cached_tokens=3000).mode == "full"
    assert plan(4000, cached_tokens=2999).mode == "sparse"


def test_true_ignores_the_threshold_and_false_turns_it_off():
    assert plan(400, enabled=True).mode == "sparse"
    assert plan(400, enabled=True).reason == "requested"
    off = plan(4000, enabled=False)
    assert (off.mode, off.reason) == ("full", "turned off by the request")


def test_keep_comes_from_the_request_before_the_policy():
    assert plan().keep == Fraction(1, 5)
    assert plan(keep=Fraction(3, 10)).keep == Fraction(3, 10)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"refusal": "no draft model is loaded"}, "no draft model is loaded"),
        ({"prompt_logprobs": 0}, "prompt log-probabilities need the logits of every token"),
        ({"draft_context": 3999}, "the prompt has 4000 tokens, the draft's context 3999"),
        ({"keep": Fraction(1)}, "keep is 100 %"),
    ],
)
def test_reasons_for_a_full_prefill_even_when_forced(arguments, reason):
    refused = plan(enabled=True, **arguments)
    assert (refused.mode, refused.reason) == ("full", reason)


def test_policy_can_be_off():
    off = EngineConfig(policy=SpecPrefillPolicy(enabled=False))
    assert plan(20_000, config=off).reason == "off by server policy"
    assert plan(20_000, config=off, enabled=True).mode == "sparse"


def test_mostly_forced_prompts_are_prefilled_fully():
    system = PromptSpan("system", 0, 4, 2500, 2502)
    refused = plan(4000, enabled=True, wide="user", spans=(system, PromptSpan("user", 2502, 2506, 3990, 3992)))
    assert refused.mode == "full"
    assert "forced tokens are 7" in refused.reason
    assert "limit 60%" in refused.reason


GATED = EngineConfig(policy=SpecPrefillPolicy(threshold=None, min_saving_ms=100.0))


def test_with_measured_costs_the_predicted_saving_decides():
    def predict(kept: int) -> Prediction:
        return Prediction(full_ms=1000.0, sparse_ms=kept)

    pays = plan(4000, config=GATED, predict=predict)
    assert (pays.mode, pays.reason) == ("sparse", "predicted 0.80 s sparse, 1.00 s full")
    refused = plan(4000, config=GATED, predict=predict, keep=Fraction(1, 4))
    assert refused.mode == "full"
    assert refused.reason == "predicted 1.00 s sparse, 1.00 s full: too little to gain"
    assert refused.predicted == Prediction(1000.0, 1000.0)


def test_without_measured_costs_the_length_decides():
    assert plan(8192, config=GATED).mode == "full"
    assert plan(8193, config=GATED).mode == "sparse"


def test_a_threshold_overrides_measured_costs_and_a_request_overrides_both():
    assert plan(4000, predict=lambda kept: Prediction(1.0, 2.0)).mode == "sparse"
    forced = plan(400, enabled=True, config=GATED, predict=lambda kept: Prediction(1.0, 2.0))
    assert (forced.mode, forced.reason) == ("sparse", "requested")


def test_the_prediction_counts_the_kept_tokens_of_the_uncached_rest():
    seen = []

    def predict(kept: int) -> Prediction:
        seen.append(kept)
        return Prediction(1e4, 1.0)

    plan(4000, config=GATED, predict=predict, cached_tokens=1000)
    assert seen == [600]


SYSTEM = PromptSpan("system", 0, 4, 15_000, 15_002, ((5000, 7000),))
AGENT = (SYSTEM, PromptSpan("user", 15_002, 15_006, 15_900, 15_902))  # 94 % forced in scope user, 82 % in documents
ASKED = {"M": 16_000, "spans": AGENT, "config": GATED}


def saving(seconds):
    """One that any plan has that drops the system text, and none that keeps it."""
    return lambda kept: Prediction(60_000.0, 60_000.0 - (1000 * seconds if kept < 8000 else 0))


@pytest.mark.parametrize(
    ("facts", "mode", "scope"),
    [
        ({"enabled": True}, "sparse", "all"),
        ({"predict": saving(10)}, "full", "user"),  # a fifth of the wait is not saved
        ({"predict": saving(20)}, "sparse", "all"),
        ({}, "sparse", "all"),  # 16000 tokens are a long wait where nothing was measured
        ({"wide": "user", "enabled": True}, "full", "user"),
        ({"wide": "documents", "enabled": True}, "full", "documents"),
        ({"wide": "all", "predict": saving(13)}, "sparse", "all"),
        ({"enabled": False}, "full", "user"),
    ],
)
def test_the_scope_widens_only_as_far_as_is_needed_and_worth_it(facts, mode, scope):
    found = plan(**ASKED, **facts)
    assert (found.mode, found.scope) == (mode, scope)


def test_by_policy_a_wider_scope_has_to_save_a_long_wait():
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=None, min_saving_share=Fraction(1, 10)))
    asked = {**ASKED, "config": config}
    short = plan(**asked, predict=saving(9.5))
    assert (short.mode, short.scope) == ("full", "user")
    assert "scope all: 9.50 s to gain, limit 10 s" in short.reason
    taken = plan(**asked, predict=saving(10))
    assert (taken.mode, taken.scope) == ("sparse", "all")
    assert "scope all, in scope user " in taken.reason


def test_the_narrowest_scope_that_leaves_enough_is_taken():
    system = PromptSpan("system", 0, 4, 15_000, 15_002, ((1000, 14_000),))
    found = plan(16_000, spans=(system, AGENT[1]), config=GATED, enabled=True)
    assert (found.mode, found.scope) == ("sparse", "documents")
    assert found.choice != plan(16_000, spans=(system, AGENT[1]), config=GATED, enabled=True, wide="all").choice


def test_the_server_can_say_the_scope():
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=1000, scope="user"))
    assert plan(16_000, spans=AGENT, config=config, enabled=True).mode == "full"
    assert plan(16_000, spans=AGENT, config=config, enabled=True, wide="all").mode == "sparse"


def test_what_is_cached_does_not_count_as_forced():
    """A long system prompt that is cached leaves what follows it open to choice, in the narrowest scope."""
    spans = (SYSTEM, PromptSpan("user", 15_002, 15_006, 19_990, 19_992))
    assert plan(20_000, spans=spans, enabled=True).scope == "all"
    found = plan(20_000, spans=spans, enabled=True, cached_tokens=15_002)
    assert (found.mode, found.scope) == ("sparse", "user")
    crowded = plan(20_000, spans=spans, wide="user")
    assert (crowded.mode, crowded.crowded) == ("full", True)
