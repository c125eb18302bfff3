"""Metrics read from the engine at each scrape, and running sums under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_specprefill import EngineStats, PrefillReport

from ..generating.engine_protocol import EngineLike

__all__ = ["EngineCollector", "Totals"]


class Totals:
    """Running sums, for llama.cpp's averages."""

    def __init__(self) -> None:
        self.read = self.made = 0
        self.read_s = self.made_s = 0.0

    def add_prompt(self, account: PrefillReport) -> None:
        times = account.timings
        self.read += account.prompt_tokens - account.cached_tokens
        self.read_s += (times.draft_ms + times.select_ms + times.prefill_ms) / 1e3

    def add_answer(self, tokens: int, seconds: float) -> None:
        self.made += tokens
        self.made_s += seconds


class EngineCollector(Collector):
    """Asks the engine when it is asked.

    Attributes:
        engine: None: the model is not in memory, and there is nothing to tell.
    """

    def __init__(self, engine: EngineLike | None, model: str, totals: Totals) -> None:
        self.engine = engine
        self._model = model
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        if self.engine is None:
            return
        stats, health = self.engine.stats(), self.engine.health()
        running = stats.prefilling + stats.decoding
        yield _gauge("vllm:num_requests_running", "Requests in work.", running, self._model)
        yield _gauge("vllm:num_requests_waiting", "Requests that wait.", stats.waiting, self._model)
        yield _gauge("vllm:kv_cache_usage_perc", "Reserved share of KV memory, 0 to 1.", _usage(stats), self._model)
        yield _gauge("llamacpp:requests_processing", "Requests in work.", running)
        yield _gauge("llamacpp:requests_deferred", "Requests that wait.", stats.waiting)
        yield from self._sums()
        yield _gauge("specprefill_engine_up", "1 while the engine's thread lives.", int(health.alive))
        yield _gauge("specprefill_engine_heartbeat_age_seconds", "Since its last step.", health.heartbeat_age_s)
        yield from _counted(stats)
        yield _labelled(GaugeMetricFamily, "specprefill_memory_bytes", "Memory by consumer.", "consumer", _held(stats))
        unaccounted = stats.memory.unaccounted_bytes
        yield _gauge("specprefill_unaccounted_bytes", "Not of weights, caches or requests.", unaccounted)
        yield _labelled(GaugeMetricFamily, "specprefill_cache_bytes", "Kept for later requests.", "kind", _kept(stats))

    def _sums(self) -> Iterator[Metric]:
        totals = self._totals
        yield _count("llamacpp:prompt_tokens", "Prompt tokens that were not cached.", totals.read)
        yield _count("llamacpp:prompt_seconds", "Time of draft, selection and prefill.", totals.read_s)
        yield _count("llamacpp:tokens_predicted", "Generated tokens.", totals.made)
        yield _count("llamacpp:tokens_predicted_seconds", "Time of decoding.", totals.made_s)
        yield _gauge("llamacpp:prompt_tokens_seconds", "Mean prefill tokens/s.", _rate(totals.read, totals.read_s))
        yield _gauge("llamacpp:predicted_tokens_seconds", "Mean tokens/s.", _rate(totals.made, totals.made_s))


def _counted(stats: EngineStats) -> Iterator[Metric]:
    fallbacks = sorted(stats.fallbacks.items())
    evictions = [("memory", stats.evictions), ("disk", stats.disk_evictions)]
    yield _labelled(CounterMetricFamily, "specprefill_fallbacks", "Sparse prefills that failed.", "stage", fallbacks)
    yield _labelled(CounterMetricFamily, "specprefill_evictions", "Prefixes without room.", "tier", evictions)
    yield _count("specprefill_densified_requests", "Sparse prompts prefilled in full in idle time.", stats.densified)
    yield _count("specprefill_densified_tokens", "Their tokens.", stats.densified_tokens)
    yield _count("specprefill_prefix_hits", "Requests that found a dense prefix.", stats.prefix_hits)
    yield _count("specprefill_prefix_misses", "Requests that found none.", stats.prefix_misses)
    yield _gauge("specprefill_sessions_held", "Sparse sessions that can be extended.", stats.sessions)


def _held(stats: EngineStats) -> list[tuple[str, float]]:
    memory = stats.memory
    names = ("target_weights", "draft_weights", "requests", "reserved", "prefix_cache", "sessions", "active", "spare")
    limit = [] if memory.limit is None else [("limit", float(memory.limit))]
    return [(name, float(getattr(memory, name))) for name in names] + limit


def _kept(stats: EngineStats) -> list[tuple[str, float]]:
    memory = stats.memory
    return [("prefix", memory.prefix_cache), ("session", memory.sessions), ("disk", memory.prefix_disk)]


def _usage(stats: EngineStats) -> float:
    memory = stats.memory
    if memory.limit is None:
        return 0.0
    room = memory.limit - memory.target_weights - memory.draft_weights
    return min(1.0, memory.reserved / room) if room > 0 else 1.0


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _gauge(name: str, text: str, value: float, model: str | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[] if model is None else ["model_name"])
    family.add_metric([] if model is None else [model], value)
    return family


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)


def _labelled(kind: Any, name: str, text: str, label: str, values: Sequence[tuple[str, float]]) -> Metric:
    family: Metric = kind(name, text, labels=[label])
    for of, value in values:
        family.add_metric([of], value)  # type: ignore[attr-defined]
    return family
