"""Every number of /metrics, held against answers with known reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mlx_specprefill import (
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    PrefillReport,
    SpecPrefillOptions,
    Timings,
)
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.prefill_report import Prediction, Reached, Reason
from mlx_specprefill.selection.plan import plan_prefill
from mlx_specprefill_server.generation.generation import AnswerResult
from mlx_specprefill_server.monitoring.metrics import Metrics, metrics_text
from tests.support.waiting import eventually

from .fakes import FakeEngine, says_and_waits

SPARSE = PrefillReport(
    "sparse",
    "requested",
    1000,
    200,
    100,
    0.2,
    "draft",
    30,
    Timings(10, 400, 5, 600, 1005, 900),
    kept_spans=None,
    reason_code="requested",
)
FULL = PrefillReport(
    "full", "turned off by the request", 50, 50, 0, None, None, 0, Timings(0, 0, 0, 40, 40, 0), reason_code="request"
)


def samples(text: str) -> dict[str, float]:
    """`name{label="value",…}` to value, without the model's name, which every sample has."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "demo/target"
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def counted(engine: FakeEngine, *ends: AnswerResult) -> dict[str, float]:
    metrics = Metrics(engine, "demo/target")
    for end in ends:
        metrics.record(end)
    return samples(metrics_text([metrics]).decode())


def ended(report: PrefillReport, tokens: int, reason: Any = "stop", stopped: bool = False) -> AnswerResult:
    return AnswerResult(GenerationRequest((1,), 1), Finished(reason, tokens, report), stopped)


def test_tokens_are_summed(engine: FakeEngine) -> None:
    found = counted(engine, ended(SPARSE, 10), ended(FULL, 1, "length"))
    assert found["vllm:prompt_tokens_total"] == 1050
    assert found["vllm:generation_tokens_total"] == 11
    assert found["vllm:prefix_cache_queries_total"] == 1050
    assert found["vllm:prefix_cache_hits_total"] == 100
    assert found["specprefill_skipped_tokens_total"] == 800


def test_what_was_given_up_was_not_left_out(engine: FakeEngine) -> None:
    """A prompt that nobody waited for counts as far as it was read."""
    left = replace(SPARSE, kept_tokens=150, timings=Timings(10, 400), reached=Reached("prefill", 150))
    found = counted(engine, ended(left, 0, "cancelled"))
    assert found["specprefill_skipped_tokens_total"] == 0
    assert found["specprefill_kept_ratio_count"] == 0
    assert found["vllm:prompt_tokens_total"] == 150


def test_answers_are_counted_by_how_they_ended(engine: FakeEngine) -> None:
    failed = AnswerResult(GenerationRequest((1,), 1), Failed(ValueError("x")), False)
    found = counted(
        engine,
        ended(SPARSE, 10),
        ended(FULL, 1, "length"),
        ended(FULL, 3, "cancelled", stopped=True),
        ended(FULL, 0, "cancelled"),
        failed,
    )
    for reason, count in (("stop", 2), ("length", 1), ("abort", 1), ("error", 1)):
        assert found[f'vllm:request_success_total{{finished_reason="{reason}"}}'] == count


def test_prefills_are_counted_by_mode_and_reason(engine: FakeEngine) -> None:
    found = counted(engine, ended(SPARSE, 10), ended(FULL, 1), ended(FULL, 1))
    assert found['specprefill_requests_total{mode="sparse",reason="requested"}'] == 1
    assert found['specprefill_requests_total{mode="full",reason="request"}'] == 2
    assert found["specprefill_recalled_tokens_total"] == 30
    assert found["specprefill_kept_ratio_count"] == 1
    assert found["specprefill_kept_ratio_sum"] == pytest.approx(0.2)


def test_times_are_in_seconds(engine: FakeEngine) -> None:
    found = counted(engine, ended(SPARSE, 10))
    assert found["vllm:time_to_first_token_seconds_sum"] == pytest.approx(1.015)
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(1.915)
    for stage, seconds in (("queue", 0.01), ("draft", 0.4), ("select", 0.005), ("prefill", 0.6), ("decode", 0.9)):
        assert found[f'specprefill_stage_seconds_sum{{stage="{stage}"}}'] == pytest.approx(seconds)


def test_every_token_after_the_first_is_a_gap(engine: FakeEngine) -> None:
    found = counted(engine, ended(SPARSE, 10), ended(FULL, 1))
    name = "vllm:inter_token_latency_seconds"
    assert found[f"{name}_count"] == 9
    assert found[f"{name}_sum"] == pytest.approx(0.9)
    assert found[f'{name}_bucket{{le="0.1"}}'] == 9  # 100 ms each
    assert found[f'{name}_bucket{{le="0.075"}}'] == 0
    assert found[f'{name}_bucket{{le="+Inf"}}'] == 9


def test_an_answer_without_tokens_has_no_times(engine: FakeEngine) -> None:
    found = counted(engine, ended(FULL, 0, "cancelled"))
    assert found["vllm:time_to_first_token_seconds_count"] == 0


def test_the_engine_is_asked_at_the_scrape(engine: FakeEngine) -> None:
    metrics = Metrics(engine, "demo/target")
    engine._running, engine._waiting = 2, 3
    found = samples(metrics_text([metrics]).decode())
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:kv_cache_usage_perc"] == pytest.approx(70 / 1400)
    assert found['specprefill_fallbacks_total{stage="draft"}'] == 1
    assert found["specprefill_densified_requests_total"] == 2
    assert found["specprefill_densified_tokens_total"] == 300
    assert found['specprefill_evictions_total{tier="memory"}'] == 6
    assert found['specprefill_evictions_total{tier="disk"}'] == 7
    assert found["specprefill_disk_bytes"] == 5
    for consumer, count in (("target_weights", 1000), ("draft_weights", 100), ("requests", 60), ("prefix_cache", 20)):
        assert found[f'specprefill_memory_bytes{{consumer="{consumer}"}}'] == count
    assert found["specprefill_engine_up"] == 1
    engine.alive = False
    assert samples(metrics_text([metrics]).decode())["specprefill_engine_up"] == 0


def test_two_applications_count_apart(engine: FakeEngine) -> None:
    first, second = Metrics(engine, "a"), Metrics(engine, "a")
    first.record(ended(FULL, 1))
    assert 'vllm:generation_tokens_total{model_name="a"} 1.0' in metrics_text([first]).decode()
    assert 'vllm:generation_tokens_total{model_name="a"} 0.0' in metrics_text([second]).decode()


def test_the_endpoint(client: TestClient) -> None:
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "specprefill": True})
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert samples(answer.text)['specprefill_requests_total{mode="sparse",reason="other"}'] == 1


def test_an_answer_that_nobody_waited_for_is_counted(engine: FakeEngine, live: Callable[..., Any]) -> None:
    base, _ = live()
    said = says_and_waits(engine, "Hello")
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=60) as answer:
        stream = answer.iter_lines()  # held: a dropped iterator closes the connection
        next(stream)
        assert said.wait(60)
    assert engine.idle()
    aborted = 'vllm:request_success_total{finished_reason="abort"}'
    assert eventually(lambda: aborted in samples(httpx.get(f"{base}/metrics", timeout=60).text))
    found = samples(httpx.get(f"{base}/metrics", timeout=60).text)
    assert found[aborted] == 1
    assert found["vllm:generation_tokens_total"] == 5


ESTIMATED = {"threshold": None, "min_kept": 0}


@pytest.mark.parametrize(
    ("label", "options", "config", "more"),
    [
        ("requested", SpecPrefillOptions(True), {}, {}),
        ("request", SpecPrefillOptions(False), {}, {}),
        ("threshold", SpecPrefillOptions(), {"threshold": 10}, {}),
        ("threshold", SpecPrefillOptions(), {"threshold": 8192}, {}),
        ("policy", SpecPrefillOptions(), {"enabled": False}, {}),
        ("keep-all", SpecPrefillOptions(True, Fraction(1)), {}, {}),
        ("no-draft", SpecPrefillOptions(True), {}, {"sparse_refusal": Reason("no-draft", "no draft model is loaded")}),
        ("draft-context", SpecPrefillOptions(True), {}, {"draft_context": 100}),
        ("short", SpecPrefillOptions(), {"threshold": None}, {}),
        ("everything", SpecPrefillOptions(), {"threshold": 10}, {"about_everything": "How many"}),
        ("predicted", SpecPrefillOptions(), ESTIMATED, {"predict": lambda kept: Prediction(1.0, 5000.0)}),
        ("predicted", SpecPrefillOptions(), ESTIMATED, {"predict": lambda kept: Prediction(1.0, 2.0)}),
    ],
)
def test_what_the_planner_says_has_a_word(label: str, options: Any, config: Any, more: dict[str, Any]) -> None:
    words = more.pop("about_everything", None)
    request = GenerationRequest(tuple(range(600)), 1, specprefill=options, about_everything=words)
    engine_config = EngineConfig(policy=SpecPrefillPolicy(**config))
    plan = plan_prefill(request, engine_config, **{"sparse_refusal": None, **more})
    assert plan.reason.code == label


def test_a_prompt_with_several_answers_counts_once(engine: FakeEngine) -> None:
    first = ended(SPARSE, 10)
    copy = replace(ended(replace(SPARSE, cached_tokens=999), 5), copy=True)
    found = counted(engine, first, copy)
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 1000
    assert found["vllm:prefix_cache_hits_total"] == 100
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:generation_tokens_total"] == 15
    assert found["vllm:inter_token_latency_seconds_count"] == 9 + 4
    assert found['specprefill_requests_total{mode="sparse",reason="requested"}'] == 1


def test_a_request_for_several_answers_counts_its_prompt_once(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    found = samples(client.get("/metrics").text)
    assert found["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    assert found["vllm:generation_tokens_total"] == usage["completion_tokens"]
