#!/usr/bin/env python3
"""Write the Grafana dashboard from the names of the metrics; a test compares it with what /metrics has.

scripts/make_dashboard.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "deploy" / "grafana" / "dashboards" / "mlx-specprefill.json"
Kind = Literal["gauge", "counter", "histogram"]
WIDTH, HEIGHT, PER_ROW = 8, 8, 3  # of a panel, in Grafana's grid of 24 columns
QUANTILES = (0.5, 0.95)
SOURCE = {"type": "prometheus", "uid": "${source}"}


@dataclass(frozen=True)
class Shown:
    """One metric: `name` as /metrics has its family, `by` the label that tells its lines apart."""

    name: str
    kind: Kind
    title: str
    by: str | None = None

    @property
    def unit(self) -> str:
        if self.kind == "counter":
            return "cps"
        endings = {"_seconds": "s", "_bytes": "bytes", "_ratio": "percentunit", "_perc": "percentunit"}
        return next((unit for ending, unit in endings.items() if self.name.endswith(ending)), "short")


ROWS: dict[str, tuple[Shown, ...]] = {
    "Answers": (
        Shown("vllm:time_to_first_token_seconds", "histogram", "Time to the first token"),
        Shown("vllm:inter_token_latency_seconds", "histogram", "Time between tokens"),
        Shown("vllm:e2e_request_latency_seconds", "histogram", "Time to the last token"),
        Shown("vllm:num_requests_running", "gauge", "Requests in work"),
        Shown("vllm:num_requests_waiting", "gauge", "Requests that wait"),
        Shown("vllm:request_success", "counter", "Answers per second, by how they ended", "finished_reason"),
        Shown("vllm:prompt_tokens", "counter", "Prompt tokens per second"),
        Shown("vllm:generation_tokens", "counter", "Generated tokens per second"),
    ),
    "Sparse prefill": (
        Shown("specprefill_requests", "counter", "Prompts per second, by prefill", "mode"),
        Shown("specprefill_kept_ratio", "histogram", "Share of sparse prompts that the target read"),
        Shown("specprefill_skipped_tokens", "counter", "Prompt tokens per second that it did not read"),
        Shown("specprefill_stage_seconds", "histogram", "Time of the stages", "stage"),
        Shown("specprefill_sessions", "counter", "Follow-up turns per second", "continuation"),
        Shown("specprefill_fallbacks", "counter", "Sparse prefills per second that failed", "stage"),
        Shown("specprefill_densified_requests", "counter", "Prompts per second made dense in idle time"),
        Shown("specprefill_densified_tokens", "counter", "Tokens per second made dense in idle time"),
        Shown("specprefill_sessions_held", "gauge", "Sparse sessions that can be extended"),
    ),
    "Caches and memory": (
        Shown("specprefill_memory_bytes", "gauge", "Memory by consumer", "consumer"),
        Shown("specprefill_unaccounted_bytes", "gauge", "Memory of no consumer"),
        Shown("specprefill_cache_bytes", "gauge", "Kept for later requests", "kind"),
        Shown("vllm:kv_cache_usage_perc", "gauge", "Reserved share of KV memory"),
        Shown("vllm:prefix_cache_queries", "counter", "Prompt tokens per second looked up"),
        Shown("vllm:prefix_cache_hits", "counter", "Prompt tokens per second found"),
        Shown("specprefill_prefix_hits", "counter", "Requests per second that found a prefix"),
        Shown("specprefill_prefix_misses", "counter", "Requests per second that found none"),
        Shown("specprefill_evictions", "counter", "Prefixes per second without room", "tier"),
    ),
    "Engine": (
        Shown("specprefill_engine_up", "gauge", "The engine's thread lives"),
        Shown("specprefill_engine_heartbeat_age_seconds", "gauge", "Time since its last step"),
    ),
}


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")
    print(FILE)


def text() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": place(0, y, 24, 1), "panels": []})
        y += 1
        for i, shown in enumerate(row):
            at = place(WIDTH * (i % PER_ROW), y + HEIGHT * (i // PER_ROW), WIDTH, HEIGHT)
            panels.append(panel(shown, at))
        y += HEIGHT * -(-len(row) // PER_ROW)
    for number, made in enumerate(panels, 1):
        made["id"] = number
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": "mlx-specprefill",
        "uid": "mlx-specprefill",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def panel(shown: Shown, at: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(queries(shown))
    ]
    defaults = {"unit": shown.unit, "min": 0, "custom": {"fillOpacity": 10}}
    return {
        "type": "timeseries",
        "title": shown.title,
        "description": shown.name,
        "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def queries(shown: Shown) -> list[tuple[str, str]]:
    """PromQL and legend of every line, summed over what the panel does not tell apart."""
    by = [shown.by] if shown.by else []
    legend = f"{{{{{shown.by}}}}}" if shown.by else ""
    if shown.kind == "gauge":
        return [(f"sum by ({', '.join(by)}) ({shown.name})", legend)]
    if shown.kind == "counter":
        return [(f"sum by ({', '.join(by)}) (rate({shown.name}_total[$__rate_interval]))", legend)]
    buckets = f"sum by ({', '.join(['le', *by])}) (rate({shown.name}_bucket[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {buckets})", f"{legend} p{round(100 * q)}".strip()) for q in QUANTILES]


if __name__ == "__main__":
    main()
