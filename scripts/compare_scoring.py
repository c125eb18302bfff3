#!/usr/bin/env python3
"""Ways to choose a prompt's tokens, compared by what they keep of what the answer needs. No target runs.

    python scripts/compare_scoring.py --pair demo smollm2 --task niah_multikey_1 real -n 20
    python scripts/compare_scoring.py --pair smollm2 --task real --heads other.json --depth 10 15

An arm is a scorer and a selection, as requests get them: the paper's rule, the default with the pair's calibrated
heads (without any it scores as the paper does), with the heads of each `--heads` file, and with those of the pair's
heads that lie in its first `--depth` layers (not with trained heads). To try another rule, add an arm to `arms_of`.

Printed is the share of gold tokens that each arm keeps, as a mean over the items of a task, and the difference to the
default with its 95 % interval. Tasks that need their document as a whole have no gold. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_specprefill import (
    EngineConfig,
    GenerationRequest,
    ModelPair,
    RuleName,
    SpecPrefillOptions,
    keep_pct,
)
from mlx_specprefill.adapters.capture import HeadCapture
from mlx_specprefill.adapters.depth import first_layers, whole_draft
from mlx_specprefill.adapters.heads import DraftHeads, read_heads
from mlx_specprefill.adapters.retrieval_heads import RetrievalDraft
from mlx_specprefill.specprefill.forced import template_mask
from mlx_specprefill.specprefill.plan import plan_prefill
from mlx_specprefill.specprefill.scorer import ToScore, question_span
from mlx_specprefill.specprefill.scorers import scorer_for
from mlx_specprefill.specprefill.selector import select_tokens
from mlx_specprefill.specprefill.text import TextReader
from mlx_specprefill_evals.statistics import paired_difference
from mlx_specprefill_evals.tasks import GROUPS, TASKS, Item, Space, make_item
from mlx_specprefill_server.cli.common import load
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.prompting.conversation import conversation
from mlx_specprefill_server.prompting.prompt import Prompt, PromptBuilder

import mlx.core as mx  # isort: skip - after the library, which loads a fast BLAS

CONFIG = EngineConfig()
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Arm:
    """A way to choose. `draft`: the layers that run; `heads`: None for a draft that is not calibrated."""

    rule: RuleName
    draft: Any
    heads: DraftHeads | None


def arms_of(pair: ModelPair, files: Sequence[Path], depths: Sequence[int]) -> dict[str, Arm]:
    whole = whole_draft(pair.draft)
    arms = {"paper": Arm("paper", whole, None), "default": Arm("default", pair.draft, pair.heads)}
    for file in files:
        heads = read_heads(file)
        arms[file.stem] = Arm("default", first_layers(whole, heads.depth), heads)
    calibrated = pair.heads is not None and not isinstance(pair.draft, RetrievalDraft)
    for depth in depths if calibrated else ():
        draft = first_layers(whole, depth)
        below = tuple(head for head in pair.heads.heads if head.call < _calls(draft))
        if below:
            arms[f"{depth} layers"] = Arm("default", draft, replace(pair.heads, heads=below, depth=depth))
    return arms


def _calls(draft: Any) -> int:
    """Attention calls of a forward."""
    capture = HeadCapture(2, {})
    with capture.of_passage(2, 2, slice(0, 2)):
        draft(mx.zeros((1, 2), dtype=mx.int32))
    return capture.calls


class Examiner:
    """Makes items for one pair and asks its draft."""

    def __init__(self, pair: ModelPair, keep: str) -> None:
        self._eos = pair.eos_token_ids
        self._options = SpecPrefillOptions(enabled=True, keep_pct=keep_pct(keep))
        self._tokenizer, self._text = pair.tokenizer, TextReader(pair.tokenizer)
        self._builder = PromptBuilder(pair.tokenizer)

    def item(self, task: str, number: int, length: int) -> Item:
        return make_item(TASKS[task], task, number, Space(length, self._count))

    def recall(self, item: Item, arms: Mapping[str, Arm]) -> dict[str, float]:
        """Share of the gold tokens that each arm keeps."""
        prompt, spans = self._prompt(item)
        gold = np.unique(np.concatenate([np.arange(*span) for span in spans]))
        return {name: float(np.isin(gold, self._kept(arm, prompt)).mean()) for name, arm in arms.items()}

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _prompt(self, item: Item) -> tuple[Prompt, Spans]:
        """Up to the last question; what an answer is given to begin with is left out."""
        if item.known is not None and item.known.raw:
            text = item.turns[-1].question
            return asyncio.run(self._builder.raw(text)), asyncio.run(self._builder.raw_passages(text, item.gold))
        turns = [(("user", turn.question), ("assistant", turn.answer)) for turn in item.turns]
        said = conversation([{"role": role, "content": text} for turn in turns for role, text in turn][:-1])
        return asyncio.run(self._builder.chat(said)), asyncio.run(self._builder.passages(said, item.gold))

    def _kept(self, arm: Arm, prompt: Prompt) -> np.ndarray:
        """What the engine would show the target."""
        options, text = replace(self._options, rule=arm.rule), self._text.read(prompt.tokens)
        request = GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans)
        plan = plan_prefill(request, CONFIG, sparse_refusal=None)
        said = prompt.spans[-1].content_end if prompt.spans else None
        asks = question_span(len(prompt.tokens), CONFIG.scoring, said, text.units)
        template = template_mask(prompt.spans, asks, plan.forced)
        given = {"question": asks, "template": template, "stop_ids": self._eos}
        task = ToScore.alone(arm.draft, prompt.tokens, CONFIG.scoring, **given)
        slices = scorer_for(arm.rule, arm.heads, CONFIG.scoring).score(arm.draft, task)
        while True:
            try:
                next(slices)
            except StopIteration as finished:
                importance = finished.value.importance
                return select_tokens(importance, plan.forced, text, plan.keep, CONFIG.selection_by(arm.rule)).kept


def show(title: str, arms: Sequence[str], found: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    print(f"\n{title}\n\n| arm | " + " | ".join(f"{task}, N = {len(items)}" for task, items in found.items()) + " |")
    print("|" + " --- |" * (1 + len(found)))
    for arm in arms:
        cells = []
        for items in found.values():
            own, default = ([item[name] for item in items] for name in (arm, "default"))
            mean, low, high = paired_difference(default, own)
            cells.append(f"{np.mean(own):.3f} ({mean:+.2f}: {low:+.2f} to {high:+.2f})")
        print(f"| {arm} | " + " | ".join(cells) + " |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs="+", default=["demo"], help="names in models/pairs.toml")
    parser.add_argument("--task", nargs="+", default=["niah_multikey_1"], choices=sorted({*TASKS, *GROUPS}))
    parser.add_argument("--heads", nargs="+", type=Path, default=[], help="files of calibrated heads")
    parser.add_argument("--depth", nargs="+", type=int, default=[], help="numbers of first layers")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--keep", default="0.2", help="share of chunks")
    parser.add_argument("-n", type=int, default=20, help="items per task")
    parser.add_argument("--seed", type=int, default=30_000, help="number of the first item")
    options = parser.parse_args(arguments)
    tasks = dict.fromkeys(task for name in options.task for task in GROUPS.get(name, (name,)))
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.pair:
        pair = load(find_pair(name), "auto")
        examiner, arms = Examiner(pair, options.keep), arms_of(pair, options.heads, options.depth)
        found = {}
        for task in tasks:
            numbers = range(options.seed, options.seed + options.n)
            items = [examiner.item(task, number, options.length) for number in numbers]
            if recalls := [examiner.recall(item, arms) for item in items if item.gold]:
                found[task] = recalls
        show(f"{name}, {options.length} tokens, keep {options.keep}", list(arms), found)
        report[name] = {t: {a: float(np.mean([i[a] for i in items])) for a in arms} for t, items in found.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
