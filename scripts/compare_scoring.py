#!/usr/bin/env python3
"""Ways to choose a prompt's tokens, compared by what they keep of what the answer needs and by what answers become.

    python scripts/compare_scoring.py --pair demo smollm2 --task niah_multikey_1 -n 20          drafts only
    python scripts/compare_scoring.py --pair smollm2 --task real -n 40                          the target as well
    python scripts/compare_scoring.py --pair smollm2 --task real --draft-only --heads other.json --depth 10 15

Compared are the arms of `mlx-specprefill eval` that ask the draft, by default both rules: `sparse` (the default, with
the pair's calibrated heads; without any it scores as the paper does) and `paper`. Then the default rule with the heads
of each `--heads` file, and with those of the pair's heads that lie in its first `--depth` layers (not with trained
heads). A new rule is a scorer in `specprefill/scorers.py` and an arm in `mlx_specprefill_evals/arms.py`; new heads are
a file.

Tasks whose answers are known word for word (the suite `real`) are measured as by `eval`: after each arm's prefill of
the target one forward over the gold answer. NLL (nats per token), share of its tokens that are the likeliest ("tokens
right"), KL to full prefill, top-1 agreement with it, gold kept; with 95 % intervals, paired with full prefill over the
same items. Of all other tasks, and of all with `--draft-only`, gold kept only: the share of chunks with gold in
them whose gold is kept, with the paired difference to the first arm. Tasks that need their document as a whole
have no gold. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_specprefill import Engine, ModelPair
from mlx_specprefill.adapters.capture import HeadCapture
from mlx_specprefill.adapters.depth import first_layers, whole_draft
from mlx_specprefill.adapters.heads import DraftHeads, read_heads
from mlx_specprefill.adapters.retrieval_heads import RetrievalDraft
from mlx_specprefill.loading import with_heads
from mlx_specprefill_evals.arms import FULL, Arm, arms
from mlx_specprefill_evals.command import Options, evaluate
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_evals.statistics import paired_difference
from mlx_specprefill_evals.tasks import GROUPS, REAL, TASKS, Space, make_item
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.pairs import find_pair

import mlx.core as mx  # isort: skip - after the library, which loads a fast BLAS

GoldKept = dict[str, list[dict[str, float]]]  # by task, of each item: by arm


def variants(pair: ModelPair, files: Sequence[Path], depths: Sequence[int]) -> Iterator[tuple[str, ModelPair]]:
    """The pair as it is, and with other heads."""
    yield "own heads", pair
    whole = replace(pair, draft=whole_draft(pair.draft), heads=None)
    for file in files:
        yield file.stem, with_heads(whole, read_heads(file))
    calibrated = pair.heads is not None and not isinstance(pair.draft, RetrievalDraft)
    for depth in depths if calibrated else ():
        below = _below(pair.heads, depth, _calls(first_layers(whole.draft, depth)))
        if below is not None:
            yield f"{depth} layers", with_heads(whole, below)


def _below(heads: DraftHeads, depth: int, calls: int) -> DraftHeads | None:
    found = tuple(head for head in heads.heads if head.call < calls)
    return replace(heads, heads=found, depth=depth) if found else None


def _calls(draft: Any) -> int:
    """Attention calls of a forward."""
    capture = HeadCapture(2, {})
    with capture.of_passage(2, 2, slice(0, 2)):
        draft(mx.zeros((1, 2), dtype=mx.int32))
    return capture.calls


def gold_kept(
    model: LocalModel, tasks: Sequence[str], compared: Sequence[Arm], options: argparse.Namespace
) -> GoldKept:
    found: GoldKept = {}
    space = Space(options.length, model.count)
    for task in tasks:
        for number in range(options.seed, options.seed + options.n):
            item = make_item(TASKS[task], task, number, space)
            if item.gold:
                kept = model.gold_kept(item, compared, number)
                found.setdefault(task, []).append({arm.name: share for arm, share in kept.items()})
    return found


def show(found: Mapping[str, Sequence[Mapping[str, float]]], first: str) -> None:
    """Mean gold kept, and the paired difference to the first arm with its interval."""
    print("| arm | " + " | ".join(f"{task}, N = {len(items)}" for task, items in found.items()) + " |")
    print("|" + " --- |" * (1 + len(found)))
    for name in next(iter(found.values()))[0]:
        cells = []
        for items in found.values():
            own, other = ([item[arm] for item in items] for arm in (name, first))
            mean, low, high = paired_difference(other, own)
            beside = "" if name == first else f" ({mean:+.2f}: {low:+.2f} to {high:+.2f})"
            cells.append(f"{np.mean(own):.3f}{beside}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def compare(pair: ModelPair, compared: Sequence[Arm], tasks: Sequence[str], options: argparse.Namespace) -> Any:
    """The report of tasks with known answers, and gold kept of the others."""
    known = () if options.draft_only else tuple(task for task in tasks if task in REAL)
    others = [task for task in tasks if task not in known]
    found: dict[str, Any] = {}
    with Engine(pair, examination()) as engine:
        model = LocalModel(engine)
        if others:
            found["gold_kept"] = gold_kept(model, others, compared, options)
            show(found["gold_kept"], compared[0].name)
        if known:
            plan = Options(known, (options.length,), (), (), (FULL, *compared), options.n, seed=options.seed)
            found["known"] = evaluate(plan, model, lambda line: print(line, flush=True))["paired"]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs="+", default=["demo"], help="names in models/pairs.toml")
    parser.add_argument("--task", nargs="+", default=["niah_multikey_1"], choices=sorted({*TASKS, *GROUPS}))
    parser.add_argument("--arm", nargs="+", default=["sparse", "paper"], help="arms of the evaluation")
    parser.add_argument("--heads", nargs="+", type=Path, default=[], help="files of calibrated heads")
    parser.add_argument("--depth", nargs="+", type=int, default=[], help="numbers of first layers")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--keep", default="0.2", help="share of chunks")
    parser.add_argument("-n", type=int, default=20, help="items per task")
    parser.add_argument("--seed", type=int, default=30_000, help="number of the first item")
    parser.add_argument("--draft-only", action="store_true", help="gold kept only: no target runs")
    options = parser.parse_args(arguments)
    tasks = list(dict.fromkeys(task for name in options.task for task in GROUPS.get(name, (name,))))
    report: dict[str, dict[str, Any]] = {}
    for name in options.pair:
        pair = load(find_pair(name), "auto")
        compared = arms(options.arm, [options.keep])[1:]
        for title, variant in variants(pair, options.heads, options.depth):
            print(f"\n{name}, {title}, {options.length} tokens, keep {options.keep}\n", flush=True)
            report.setdefault(name, {})[title] = compare(variant, compared, tasks, options)
            compared = [arm for arm in compared if arm.rule == "default"]  # the paper's has no heads
    print(json.dumps(report))


if __name__ == "__main__":
    main()
