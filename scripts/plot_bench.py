#!/usr/bin/env python3
"""Draws what scripts/bench ttft or load printed.

scripts/bench ttft | tee run.txt
scripts/plot_bench.py run.txt ttft.svg

    ttft   times over prompt length, and the share of the limit, for every keep share; several runs of one pair become
           one picture
    load   the time to first token over the rate of requests, for every server
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot, rc_context

COLOURS = {"ours, sparse": "#0b6e4f", "ours, full": "black", "mlx_lm.server": "#d62728"}


def plot_ttft(runs: list[dict[str, Any]], file: Path) -> None:
    figure, (times, shares) = pyplot.subplots(1, 2, figsize=(10, 4))
    rows = sorted((row for run in runs for row in run["rows"]), key=lambda row: row["tokens"])
    for keep in sorted({row["keep"] for row in rows}):
        part = [row for row in rows if row["keep"] == keep]
        lengths = [row["tokens"] for row in part]
        times.plot(lengths, [row["sparse_ttft_ms"] / 1e3 for row in part], marker="o", label=f"keep {keep:g}")
        shares.plot(lengths, [row["share_of_limit"] for row in part], marker="o", label=f"keep {keep:g}")
    full = list({row["tokens"]: row for row in rows}.values())
    lengths = [row["tokens"] for row in full]
    times.plot(lengths, [row["full_ttft_ms"] / 1e3 for row in full], color="black", marker="s", label="full")
    title = f"{runs[0]['target']}, {runs[0]['device']}"
    times.set(xlabel="prompt tokens", ylabel="seconds to first token", xscale="log", yscale="log", title=title)
    shares.set(xlabel="prompt tokens", ylabel="share of the limit", xscale="log", ylim=(0, 1.2))
    shares.axhline(1, color="grey", linewidth=0.5)
    times.legend()
    save(figure, file)


def plot_load(runs: list[dict[str, Any]], file: Path) -> None:
    """Rates without a percentile, because so many requests have no first token, are left out."""
    figure, panel = pyplot.subplots(figsize=(6.5, 4))
    for arm in dict.fromkeys(row["arm"] for row in runs[0]["rows"]):
        for percentile, line in (("p95_s", "-"), ("p50_s", ":")):
            found = sorted((row["rate"], row[percentile]) for row in runs[0]["rows"] if row["arm"] == arm)
            points = [(rate, seconds) for rate, seconds in found if seconds is not None]
            rates, seconds = zip(*points, strict=True) if points else ((), ())
            name = f"{arm}, {'95th percentile' if percentile == 'p95_s' else 'median'}"
            panel.plot(rates, seconds, linestyle=line, marker="o", markersize=4, color=COLOURS[arm], label=name)
    panel.axhline(runs[0]["limit_s"], color="grey", linewidth=0.5)
    panel.set(xlabel="requests per second", ylabel="seconds to first token", yscale="log")
    panel.set_xscale("log", base=2)  # as rates are doubled
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    panel.legend(fontsize=8)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Nothing depends on the day: a plot that is made again is the same file."""
    figure.tight_layout()
    with rc_context({"svg.hashsalt": "plot"}):
        figure.savefig(file, metadata={"Date": None})


PLOTS = {"ttft": plot_ttft, "load": plot_load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="the benchmark's outputs; their last lines are what counts")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    runs = [json.loads(run.read_text().strip().splitlines()[-1]) for run in options.runs]
    PLOTS[runs[0]["benchmark"]](runs, options.picture)


if __name__ == "__main__":
    main()
