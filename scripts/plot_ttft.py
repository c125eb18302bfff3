#!/usr/bin/env python3
"""Draws what scripts/bench ttft printed: times over prompt length, and the share of the limit, for every keep share.

scripts/bench ttft | tee run.txt
scripts/plot_ttft.py run.txt ttft.svg

Several runs of one pair become one picture.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot


def plot(runs: list[dict[str, Any]], file: Path) -> None:
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
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="the benchmark's outputs; their last lines are what counts")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    plot([json.loads(run.read_text().strip().splitlines()[-1]) for run in options.runs], options.picture)


if __name__ == "__main__":
    main()
