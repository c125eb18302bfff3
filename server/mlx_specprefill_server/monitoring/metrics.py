"""Prometheus metrics of answers, under vLLM's names for its dashboards, and under our own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_specprefill import Engine, EngineStats, Finished, PrefillReport, Timings

from ..generation.generation import AnswerResult

MODEL = "model_name"  # a label that vLLM's metrics have
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
GAPS_TEXT = "Time between tokens; every token with its answer's mean."
CONSUMERS = (
    "target_weights",
    "draft_weights",
    "requests",
    "reserved",
    "prefix_cache",
    "active",
    "spare",
    "limit",
)
STAGES = ("queue", "draft", "select", "prefill", "decode")


class Metrics(Collector):
    """The counts of one model, in a registry of its own, and the values of its engine. Used on the event loop.

    Attributes:
        engine: the engine; None: the model is not in memory and has no values.
    """

    def __init__(self, engine: Engine | None, model: str) -> None:
        self.registry = CollectorRegistry()
        self.engine = engine
        self.model = model
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens, cached and dropped ones included.")
        self._generated = self._counter("vllm:generation_tokens", "Generated tokens.")
        self._queried = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hit = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._success = self._counter("vllm:request_success", "Answers by the reason of their end.", "finished_reason")
        self._first = self._histogram("vllm:time_to_first_token_seconds", "Time from arrival to the first token.")
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.")
        self._gaps = self._histogram("vllm:inter_token_latency_seconds", GAPS_TEXT, buckets=GAPS)
        self._requests = self._counter(
            "specprefill_requests", "Prompts by mode of prefill and reason.", "mode", "reason"
        )
        self._kept = self._histogram(
            "specprefill_kept_ratio", "Share of sparse prompts that the target read.", buckets=SHARES
        )
        self._skipped = self._counter("specprefill_skipped_tokens", "Prompt tokens that the target did not read.")
        self._stages = self._histogram("specprefill_stage_seconds", "Time of a request's stages.", "stage")
        self._recalled = self._counter(
            "specprefill_recalled_tokens", "Tokens that an earlier turn had dropped and a later one read."
        )
        self._deferred_tools = self._counter("specprefill_deferred_tools", "Tools that prompts left out until needed.")
        self._deferred_tokens = self._counter("specprefill_deferred_tokens", "Tokens of tools that were left out.")
        self._verdicts = self._counter(
            "specprefill_verdicts", "Sparse answers by what full reading says of them.", "verdict"
        )
        self.registry.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def record(self, result: AnswerResult) -> None:
        """Count one answer. The prompt of several answers, and its time in the queue, count once."""
        self._success.labels(result.reason).inc()
        report = result.event.report
        if report is None:
            return
        tokens = result.event.completion_tokens if isinstance(result.event, Finished) else 0
        self._count_answer(report.timings.decode_ms / 1e3, tokens)
        if not result.copy:
            self._count_prompt(report)
            if tokens:
                self._time(report.timings)

    def record_deferred(self, tools: int, tokens: int) -> None:
        """Count the tools that a prompt leaves out until they are loaded, and the tokens of their schemas."""
        self._deferred_tools.inc(tools)
        self._deferred_tokens.inc(tokens)

    def record_verdict(self, word: str) -> None:
        self._verdicts.labels(word).inc()

    def _count_answer(self, seconds: float, tokens: int) -> None:
        self._generated.inc(tokens)
        for _ in range(tokens - 1):
            self._gaps.observe(seconds / (tokens - 1))

    def _count_prompt(self, report: PrefillReport) -> None:
        gone = report.reached is not None  # the rest was not left out: it was given up
        length = report.kept_tokens if gone else report.prompt_tokens
        self._prompt.inc(length)
        self._queried.inc(report.prompt_tokens)
        self._hit.inc(report.cached_tokens)
        self._requests.labels(report.mode, report.reason_code).inc()
        self._skipped.inc(length - report.kept_tokens)
        if report.mode == "sparse" and not gone:
            self._kept.observe(report.kept_tokens / report.prompt_tokens)
        self._recalled.inc(report.recalled_tokens)

    def _time(self, times: Timings) -> None:
        first = (times.queue_ms + (times.ttft_ms or 0.0)) / 1e3
        self._first.observe(first)
        self._whole.observe(first + times.decode_ms / 1e3)
        for stage in STAGES:
            self._stages.labels(stage).observe(getattr(times, f"{stage}_ms") / 1e3)

    def collect(self) -> Iterator[Metric]:
        if self.engine is None:
            return
        stats, health = self.engine.stats(), self.engine.health()
        memory = stats.memory
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in work.", stats.prefilling + stats.decoding)
        yield GaugeMetricFamily("vllm:num_requests_waiting", "Requests that wait.", stats.waiting)
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", "Reserved share of KV memory, 0 to 1.", _usage(stats))
        yield GaugeMetricFamily("specprefill_engine_up", "1 while the engine's thread lives.", int(health.alive))
        yield GaugeMetricFamily(
            "specprefill_engine_heartbeat_age_seconds", "Seconds since the engine's last step.", health.heartbeat_age_s
        )
        yield from _engine_counts(stats)
        consumers = {name: value for name, value in asdict(memory).items() if name in CONSUMERS and value is not None}
        yield _family(GaugeMetricFamily, "specprefill_memory_bytes", "Memory by consumer.", "consumer", consumers)
        yield GaugeMetricFamily("specprefill_disk_bytes", "Disk space of prefixes.", memory.prefix_disk)


def metrics_text(models: Iterable[Metrics]) -> bytes:
    """Return the metrics of all models in Prometheus' text format, with the model's name on each sample."""
    return generate_latest(_AllModels(list(models)))


class _AllModels:
    """A collector that joins families of the same name from one registry per model."""

    def __init__(self, models: Sequence[Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for model in self._models:
            for source in model.registry.collect():
                family = families.setdefault(source.name, Metric(source.name, source.documentation, source.type))
                family.samples += [
                    sample._replace(labels={MODEL: model.model, **sample.labels}) for sample in source.samples
                ]
        yield from families.values()


def _engine_counts(stats: EngineStats) -> Iterator[Metric]:
    evictions = {"memory": stats.evictions, "disk": stats.disk_evictions}
    yield _family(
        CounterMetricFamily, "specprefill_fallbacks", "Sparse prefills that failed.", "stage", stats.fallbacks
    )
    yield _family(CounterMetricFamily, "specprefill_evictions", "Prefixes evicted for lack of room.", "tier", evictions)
    yield CounterMetricFamily(
        "specprefill_densified_requests", "Sparse prompts prefilled in full in idle time.", stats.densified
    )
    yield CounterMetricFamily(
        "specprefill_densified_tokens",
        "Tokens of sparse prompts prefilled in full in idle time.",
        stats.densified_tokens,
    )


def _usage(stats: EngineStats) -> float:
    memory = stats.memory
    if memory.limit is None:
        return 0.0
    room = memory.limit - memory.target_weights - memory.draft_weights
    return min(1.0, memory.reserved / room) if room > 0 else 1.0


def _family(kind: Any, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family: Metric = kind(name, text, labels=[label])
    for of, value in values.items():
        family.add_metric([of], value)  # type: ignore[attr-defined]
    return family
