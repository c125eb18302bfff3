"""Sparse or full, and the reason."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mlx_specprefill import EngineConfig, GenerationRequest, PromptSpan, SpecPrefillOptions, SpecPrefillPolicy
from mlx_specprefill.cache.prefix.selection_key import SelectionKey
from mlx_specprefill.prefill_report import Prediction, Reason
from mlx_specprefill.selection.plan import plan_prefill

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
    return plan_prefill(
        request, config, sparse_refusal=None if refusal is None else Reason("unsupported", refusal), **facts
    )


def test_policy_is_strictly_above_the_threshold():
    assert plan(1000).mode == "full"
    assert plan(1001).mode == "sparse"
    assert "1000" in plan(1000).reason.words


def test_the_threshold_looks_at_the_uncached_suffix():
    assert plan(4000, cached_tokens=3000).mode == "full"
    assert plan(4000, cached_tokens=2999).mode == "sparse"


def test_true_ignores_the_threshold_and_false_turns_it_off():
    assert plan(400, enabled=True).mode == "sparse"
    assert plan(400, enabled=True).reason.words == "requested"
    off = plan(4000, enabled=False)
    assert (off.mode, off.reason.words) == ("full", "turned off by the request")


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
    assert (refused.mode, refused.reason.words) == ("full", reason)


def test_policy_can_be_off():
    off = EngineConfig(policy=SpecPrefillPolicy(enabled=False))
    assert plan(20_000, config=off).reason.words == "off by server policy"
    assert plan(20_000, config=off, enabled=True).mode == "sparse"


@pytest.mark.parametrize("size", range(10, 1000, 38))
def test_a_prompt_of_any_length_keeps_its_template_and_the_end_of_its_question(size):
    """Also where the request sets a share: of some fifty tokens nearly all are forced, so these are read in full."""
    made = plan(size, enabled=True, keep=Fraction(1, 5), spans=(PromptSpan("user", 0, 4, size - 6, size - 2),))
    assert made.forced[[*range(4), *range(max(4, size - 6 - 32), size)]].all()
    assert made.mode == ("full" if size <= 48 else "sparse")


def test_mostly_forced_prompts_are_prefilled_fully():
    system = PromptSpan("system", 0, 4, 2500, 2502)
    refused = plan(4000, enabled=True, spans=(system, PromptSpan("user", 2502, 2506, 3990, 3992)))
    assert refused.mode == "full"
    assert "forced tokens are 7" in refused.reason.words
    assert "limit 60%" in refused.reason.words


GATED = EngineConfig(policy=SpecPrefillPolicy(threshold=None, min_saving_ms=100.0, min_kept=0))


def test_with_measured_costs_the_predicted_saving_decides():
    def predict(kept: int) -> Prediction:
        return Prediction(full_ms=1000.0, sparse_ms=kept)

    pays = plan(4000, config=GATED, predict=predict)
    assert (pays.mode, pays.reason.words) == ("sparse", "predicted about 0.8 s sparse, about 1 s full")
    refused = plan(4000, config=GATED, predict=predict, keep=Fraction(1, 4))
    assert refused.mode == "full"
    assert refused.reason.words == "predicted about 1 s sparse, about 1 s full: too little to gain"
    assert refused.predicted == Prediction(1000.0, 1000.0)


def test_without_measured_costs_the_length_decides():
    assert plan(8192, config=GATED).mode == "full"
    assert plan(8193, config=GATED).mode == "sparse"


def test_a_threshold_overrides_measured_costs_and_a_request_overrides_both():
    assert plan(4000, predict=lambda kept: Prediction(1.0, 2.0)).mode == "sparse"
    forced = plan(400, enabled=True, config=GATED, predict=lambda kept: Prediction(1.0, 2.0))
    assert (forced.mode, forced.reason.words) == ("sparse", "requested")


def test_of_a_short_prompt_the_policy_keeps_more_than_its_share():
    def predict(kept: int) -> Prediction:
        return Prediction(sparse_ms=kept, full_ms=10_000.0)

    config = EngineConfig(policy=SpecPrefillPolicy(threshold=None, min_kept=1000))
    assert plan(4000, config=config, predict=predict).keep == Fraction(1, 4)
    assert plan(5000, config=config, predict=predict).keep == Fraction(1, 5)
    assert plan(5001, config=config, predict=predict).keep == Fraction(1, 5)
    whole = plan(1000, config=config, predict=predict)
    assert (whole.mode, whole.reason.words) == ("full", "1000 prompt tokens, at least 1000 are kept")
    assert plan(999, config=config, predict=predict).mode == "full"
    assert plan(1001, config=config, predict=predict).mode == "sparse"


@pytest.mark.parametrize("asked", [{"enabled": True}, {"keep": Fraction(1, 5)}])
def test_a_request_that_asks_for_a_sparse_prefill_or_a_share_gets_it(asked):
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=None))
    sparse = plan(2000, config=config, predict=lambda kept: Prediction(sparse_ms=1.0, full_ms=10_000.0), **asked)
    assert (sparse.mode, sparse.keep) == ("sparse", Fraction(1, 5))


def test_turns_of_a_conversation_that_grows_share_one_choice():
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=None))
    choices = {
        plan(M, config=config, predict=lambda kept: Prediction(sparse_ms=1.0, full_ms=10_000.0)).selection_key
        for M in (500, 2000, 9000)
    }
    assert choices == {SelectionKey(Fraction(1, 5), "default", "user")}


def test_the_prediction_counts_the_kept_tokens_of_the_uncached_rest():
    seen = []

    def predict(kept: int) -> Prediction:
        seen.append(kept)
        return Prediction(1e4, 1.0)

    plan(4000, config=GATED, predict=predict, cached_tokens=1000)
    assert seen == [600]


SYSTEM = PromptSpan("system", 0, 4, 15_000, 15_002)
AGENT = (SYSTEM, PromptSpan("user", 15_002, 15_006, 15_900, 15_902))


@pytest.mark.parametrize(
    ("policy", "asked", "mode", "scope"),
    [
        ("user", None, "full", "user"),
        ("user", "all", "sparse", "all"),
        ("all", None, "sparse", "all"),
        ("all", "user", "full", "user"),
    ],
)
@pytest.mark.parametrize("enabled", [True, None])
def test_the_scope_is_the_requests_or_the_servers(enabled, policy, asked, mode, scope):
    """A request for a sparse prefill does not widen it."""
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=1000, scope=policy))
    found = plan(16_000, spans=AGENT, config=config, enabled=enabled, wide=asked)
    assert (found.mode, found.scope) == (mode, scope)
    assert mode == "sparse" or "forced tokens are 100% of the prompt" in found.reason.words


def test_sessions_of_either_scope_are_apart():
    narrow, wide = (plan(16_000, spans=AGENT, enabled=True, wide=scope) for scope in ("user", "all"))
    assert narrow.selection_key != wide.selection_key


def test_what_is_cached_does_not_count_as_forced():
    """A long system prompt that is cached leaves what follows it open to choice."""
    spans = (SYSTEM, PromptSpan("user", 15_002, 15_006, 19_990, 19_992))
    assert plan(20_000, spans=spans).mode == "full"
    assert plan(20_000, spans=spans, cached_tokens=15_002).mode == "sparse"


def test_before_it_is_known_what_is_cached_a_plan_is_sparse_if_it_could_become_so():
    spans = (SYSTEM, PromptSpan("user", 15_002, 15_006, 19_990, 19_992))
    seen = []

    def predict(kept: int) -> Prediction:
        seen.append(kept)
        return Prediction(1e4, kept)

    assert plan(20_000, spans=spans, config=GATED, predict=predict, cached_tokens=None).mode == "sparse"
    assert seen == [4000]  # nothing beside the share
    assert plan(20_000, spans=spans, config=GATED, predict=predict).mode == "full"
    assert plan(1000, cached_tokens=None).mode == "full"
    assert plan(20_000, spans=spans, keep=Fraction(1), cached_tokens=None).reason.words == "keep is 100 %"


def test_a_threshold_forces_no_prefill_that_is_known_to_lose_time():
    """Known are costs that this machine has shown; a prior's guess decides nothing against a threshold."""
    loses, gains = (Prediction(1000.0, sparse_ms) for sparse_ms in (1001.0, 999.0))
    assert plan(predict=lambda _: loses, gains_are_known=True).mode == "full"
    assert "nothing to gain" in plan(predict=lambda _: loses, gains_are_known=True).reason.words
    assert plan(predict=lambda _: loses).mode == "sparse"
    assert plan(predict=lambda _: gains, gains_are_known=True).mode == "sparse"
    assert plan(enabled=True, predict=lambda _: loses, gains_are_known=True).mode == "sparse"
