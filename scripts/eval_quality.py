#!/usr/bin/env python3
"""Quality of bundled pairs: full prefill, sparse prefill and random chunks, by the suite of `mlx-specprefill eval`.

    python scripts/eval_quality.py -n 50                        the demo pair, needles at 1K and 2K
    python scripts/eval_quality.py --pair demo --task ruler     other tasks, or other pairs of models/pairs.toml
    python scripts/eval_quality.py --quick                      retrieval on every bundled pair, minutes

Names, words and sentences are ones that the training of the bundled models leaves out. Greedy decoding; the random arm
keeps the same forced tokens and as many chunks as the sparse arm. The last line of output is one JSON object with the
mean scores per pair and arm.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_specprefill import Engine, LoadError, PairMismatchError
from mlx_specprefill_evals.arms import ARM_KINDS, arms
from mlx_specprefill_evals.command import Options, evaluate
from mlx_specprefill_evals.errors import EvaluationError
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.pairs import NAMED_PAIRS, Pair, PairsError, find_pair, read_pairs

QUICK: dict[str, Any] = {"task": ["niah_single_2", "niah_multikey_1"], "lengths": [1024, 2048], "n": 8, "depths": []}


def main(arguments: list[str] | None = None) -> None:
    """Run every pair and print its table."""
    options = _parser().parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    started = time.perf_counter()
    reports = {name: _examine(name, pair, options) for name, pair in _pairs(options).items()}
    if not options.quick:
        print(json.dumps(reports))
    families = {name: _means(report) for name, report in reports.items()}
    print(json.dumps({"families": families, "seconds": round(time.perf_counter() - started, 1)}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="retrieval on every bundled pair, a few items each")
    parser.add_argument("--pair", nargs="+", default=[], help="names in models/pairs.toml; default: demo")
    parser.add_argument("--target", help="model folder or hub name, instead of --pair")
    parser.add_argument("--draft", help="model folder or hub name")
    parser.add_argument("--task", nargs="+", default=["needle"], help="tasks or groups of the suite")
    parser.add_argument("--arms", nargs="+", choices=ARM_KINDS, default=["sparse", "random"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048], help="prompt tokens, at most")
    parser.add_argument("--depths", nargs="+", type=float, default=[0.1, 0.5, 0.9])
    parser.add_argument("-n", type=int, default=50, help="items per task, length and depth")
    parser.add_argument("--keep", nargs="+", default=["0.2"], help="shares of chunks that the sparse arms keep")
    parser.add_argument("--seed", type=int, default=0, help="number of the first item")
    parser.add_argument("--out", type=Path, help="folder for items, reports and plots; a run into it goes on")
    return parser


def _pairs(options: argparse.Namespace) -> dict[str, Pair]:
    """What to examine: one pair of models, named pairs, or every pair that the repository holds."""
    if options.target:
        return {Path(options.target).parent.name or options.target: Pair(target=options.target, draft=options.draft)}
    try:
        names = options.pair or (_bundled() if options.quick else ["demo"])
        return {name: find_pair(name) for name in names}
    except PairsError as error:
        sys.exit(f"error: {error}")


def _bundled() -> list[str]:
    rows = read_pairs(NAMED_PAIRS)
    return [name for name, row in rows.items() if isinstance(row.target, str) and Path(row.target).is_dir()]


def _examine(name: str, pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    print(f"pair {name}", flush=True)
    try:
        plan = Options(
            tasks=tuple(options.task),
            lengths=tuple(options.lengths),
            depths=tuple(options.depths),
            files=(),
            arms=arms(options.arms, options.keep),
            number=options.n,
            seed=options.seed,
            out=options.out and options.out / name,
        )
        with Engine(load(pair, "auto"), examination()) as engine:
            return evaluate(plan, LocalModel(engine), lambda line: print(line, flush=True))
    except (LoadError, PairMismatchError, EvaluationError) as error:
        sys.exit(f"error: {error}")


def _means(report: Mapping[str, Any]) -> dict[str, float]:
    """Per kind of arm, over all cells with equal weight; several shares are averaged as well."""
    scores: dict[str, list[float]] = {}
    for cell in report["cells"]:
        for name, row in cell["arms"].items():
            scores.setdefault(name.partition("@")[0], []).append(row["accuracy"])
    return {kind: round(sum(values) / len(values), 4) for kind, values in scores.items()}


if __name__ == "__main__":
    main()
