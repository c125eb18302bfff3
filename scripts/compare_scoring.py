#!/usr/bin/env python3
"""Ways to turn a draft's attention into chunk scores, compared by what they select. No target runs.

    python scripts/compare_scoring.py --pair demo-gpt_oss --task niah_single_2 niah_multikey_1 -n 100 --seed 30000

Query rows: `look`, the last prompt token and the look-ahead (the paper's); `A-B S`, S of the importance from the last
line of the question, at least A and at most B tokens, the rest from those, and without what template and question
attract unless it says `all`. Heads: their maximum (the paper's), their mean, or the one head that looked most at gold
in `--calibrate` items of the first task, which are not measured. Unit: the share of what was looked at most in a line
or sentence that the chunks there get at least, of that what lies eight tokens further away, and the share of what was
looked at in a rare word that other lines with it get. Chunk: tokens. Printed are the share of items of which every gold
token is kept and the share of gold tokens that are, and in brackets the difference of the first to the paper's rows,
heads and chunks with the engine's units, over the same items, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_specprefill import ModelPair, PromptSpan, ScoringConfig, SelectionConfig, keep_pct, load_pair
from mlx_specprefill.adapters import capture
from mlx_specprefill.prefill.forced import forced_mask, forced_ranges, template_mask
from mlx_specprefill.prefill.scoring import question_span
from mlx_specprefill.prefill.selection import select_tokens
from mlx_specprefill.prefill.text import PromptText, TextReader
from mlx_specprefill_server.evals.statistics import paired_difference
from mlx_specprefill_server.evals.tasks import TASKS, Item, Space, make_item
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.prompting.conversation import conversation
from mlx_specprefill_server.prompting.prompt import PromptBuilder

import mlx.core as mx  # isort: skip - after the library, which loads a fast BLAS
from mlx_lm.models.cache import make_prompt_cache  # isort: skip

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Unit = tuple[float, float, float]  # share, fade, link
Rule = tuple[str, str, Unit, int, str]  # rows, heads, unit, chunk size, keep
ROWS, WIDTH, STEP = 8, 13, 512
RULE = SelectionConfig()
OURS: Unit = (RULE.unit_share, RULE.unit_fade, RULE.link_share)
UNITS: tuple[Unit, ...] = ((0.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, 0.8, 0.0), OURS, (0.95, 0.8, 0.5), (1.0, 0.8, 0.6))
STOCK = ("look", "max", OURS, 32)


class Rows(NamedTuple):
    """The question's part in the importance."""

    least: int = 16  # tokens of the question
    most: int = 48
    share: float = ScoringConfig().question_share
    framed: bool = True  # whether template and question attract nothing

    def __str__(self) -> str:
        return f"{self.least}-{self.most} {self.share:g}{'' if self.framed else ' all'}" if self.share else "look"


LOOK = Rows(share=0.0, framed=False)
QUESTIONS = (
    LOOK,
    Rows(share=0.5, framed=False),
    Rows(share=0.5),
    Rows(share=0.7),
    Rows(),
    Rows(share=0.9),
    Rows(16, 16),
)


@dataclass(frozen=True)
class Read:
    """One prompt of M tokens: the draft's attention per query row and head, and which tokens are gold."""

    look: Floats  # (rows, heads, M)
    question: Floats  # (tokens before the end of the last message, heads, M)
    end: int  # of the last message
    gold: Bools
    spans: Sequence[PromptSpan]
    text: PromptText


class Attention:
    """The rows over the prompt of every attention call that spans it, all heads of all layers."""

    def __init__(self, prompt_len: int) -> None:
        self._prompt_len = prompt_len
        self._span = 0
        self._rows: list[mx.array] = []

    @contextmanager
    def of(self, span: int) -> Iterator[list[mx.array]]:
        """Collects the calls of one forward after which a full-length cache holds `span` tokens: (heads, L, M) each."""
        self._span, self._rows = span, []
        capture._active.capture = self
        try:
            yield self._rows
        finally:
            capture._active.capture = None

    def observe(self, queries: mx.array, keys: mx.array, scale: float, mask: Any, sinks: mx.array | None) -> None:
        heads, L, S = queries.shape[1], queries.shape[2], keys.shape[2]
        if self._span != S:
            return
        grouped = (queries * scale).reshape(1, keys.shape[1], -1, L, queries.shape[-1])
        logits = (grouped @ keys[:, :, None].swapaxes(-1, -2)).reshape(heads, L, S).astype(mx.float32)
        causal = mx.arange(S)[None] <= mx.arange(S - L, S)[:, None]
        logits = mx.where(causal, logits, -mx.inf)[..., : self._prompt_len]
        if sinks is not None:
            column = mx.broadcast_to(sinks.astype(mx.float32).reshape(-1, 1, 1), (heads, L, 1))
            logits = mx.concatenate([logits, column], axis=-1)
        rows = mx.softmax(logits, axis=-1)[..., : min(S, self._prompt_len)]
        self._rows.append(mx.pad(rows, [(0, 0), (0, 0), (0, self._prompt_len - rows.shape[-1])]))

    def observe_logits(self, logits: mx.array) -> None:
        """Hand-written attention is left out."""


class Reader:
    """Asks one pair's draft."""

    def __init__(self, pair: ModelPair) -> None:
        self._pair = pair
        self._builder = PromptBuilder(pair.tokenizer)
        self._text = TextReader(pair.tokenizer)

    def count(self, text: str) -> int:
        return len(self._pair.tokenizer.encode(text, add_special_tokens=False))

    def read(self, item: Item) -> Read:
        said = conversation(_messages(item))
        prompt = asyncio.run(self._builder.chat(said))
        gold = asyncio.run(self._builder.passages(said, item.gold))
        M, end = len(prompt.tokens), prompt.spans[-1].content_end
        most = max(rows.most for rows in QUESTIONS)
        look, question = self._attention(mx.array(prompt.tokens)[None], max(0, end - most), end)
        text = self._text.read(prompt.tokens)
        return Read(look, question, end, _mask(gold, M), prompt.spans, text)

    def _attention(self, prompt: mx.array, start: int, end: int) -> tuple[Floats, Floats]:
        M, cache, draft = prompt.shape[1], make_prompt_cache(self._pair.draft), self._pair.draft
        attention = Attention(M)
        assert draft is not None
        for at in range(0, start, STEP):
            draft(prompt[:, at : min(at + STEP, start)], cache=cache)
            mx.eval([part.state for part in cache])
        with attention.of(end) as calls:
            draft(prompt[:, start:end], cache=cache)
        question = mx.concatenate(calls).swapaxes(0, 1)
        draft(prompt[:, end : M - 1], cache=cache)
        look, token = [], prompt[:, -1:]
        for row in range(ROWS):
            with attention.of(M + row) as calls:
                token = draft(token, cache=cache)[:, -1:].argmax(axis=-1)
            look.append(mx.concatenate(calls)[:, 0])
            if token.item() in self._pair.eos_token_ids:
                break
        return np.array(mx.stack(look)), np.array(question)


def _messages(item: Item) -> list[dict[str, str]]:
    turns = [({"role": "user", "content": t.question}, {"role": "assistant", "content": t.answer}) for t in item.turns]
    return [message for turn in turns for message in turn][:-1]


def _mask(spans: Sequence[tuple[int, int]], length: int) -> Bools:
    mask = np.zeros(length, dtype=np.bool_)
    for start, end in spans:
        mask[start:end] = True
    return mask


def _importance(read: Read, rows: Rows, heads: str, best: int) -> Floats:
    joined = {"max": lambda a: a.max(axis=-2), "mean": lambda a: a.mean(axis=-2), "best": lambda a: a[..., best, :]}
    M, config = len(read.gold), ScoringConfig(question_rows=(rows.least, rows.most))
    start, end = question_span(M, config, read.end, read.text.units)
    counted = ~template_mask(read.spans, (start, end), _forced(read, SelectionConfig())) if rows.framed else 1.0

    def pooled(attention: Floats) -> Floats:
        found: Floats = joined[heads](np.array(capture.pool(mx.array(attention * counted, mx.float32), WIDTH)))
        return found

    look: Floats = pooled(read.look).mean(axis=0)
    asked = pooled(read.question[start - end :].mean(axis=0))
    importance: Floats = (1 - rows.share) * look / look.sum() + rows.share * asked / asked.sum()
    return importance.astype(np.float32)


def _forced(read: Read, rule: SelectionConfig) -> Bools:
    return forced_mask(forced_ranges(read.spans, len(read.gold), rule), len(read.gold))


def _kept_gold(read: Read, importance: Floats, share: str, rule: SelectionConfig) -> float:
    """Share of the gold tokens that are kept."""
    kept = select_tokens(importance, _forced(read, rule), read.text, keep_pct(share), rule).kept
    return float(np.isin(np.flatnonzero(read.gold), kept).mean())


def _outcomes(read: Read, shares: Sequence[str], sizes: Sequence[int], best: int) -> dict[Rule, float]:
    found = {}
    for rows, heads in product(QUESTIONS, ("max", "mean", "best")):
        importance = _importance(read, rows, heads, best)
        for unit, size in product(UNITS, sizes):
            rule = SelectionConfig(size, *unit[:2], link_share=unit[2])
            for share in shares:
                found[str(rows), heads, unit, size, share] = _kept_gold(read, importance, share, rule)
    return found


def _best_head(reads: Sequence[Read]) -> int:
    """The head whose look-ahead rows put most on gold, beyond an even spread (QRHead, arXiv 2506.09944)."""
    gain = [r.look.mean(axis=0)[:, r.gold].sum(axis=-1) - r.look.mean(axis=(0, 2)) * r.gold.sum() for r in reads]
    return int(np.mean(gain, axis=0).argmax())


def _table(outcomes: Mapping[str, Sequence[Mapping[Rule, float]]], shares: Sequence[str]) -> None:
    columns = [(name, share) for name in outcomes for share in shares]
    print("| rows | heads | unit | chunk | " + " | ".join(f"{name} at {share}" for name, share in columns) + " |")
    print("|" + " --- |" * (4 + len(columns)))
    rules = dict.fromkeys(key[:4] for found in outcomes.values() for key in found[0])
    for rule in rules:
        cells = [_cell([(f[(*STOCK, share)], f[(*rule, share)]) for f in outcomes[name]]) for name, share in columns]
        unit, size = ", ".join(f"{part:g}" for part in rule[2]), rule[3]
        print(f"| {rule[0]} | {rule[1]} | {unit} | {size} | " + " | ".join(cells) + " |", flush=True)


def _cell(pairs: Sequence[tuple[float, float]]) -> str:
    stock, other = zip(*pairs, strict=True)
    whole = [[float(kept == 1) for kept in arm] for arm in (stock, other)]
    mean, low, high = paired_difference(*whole)
    return f"{np.mean(whole[1]):.2f}, {np.mean(other):.3f} ({mean:+.2f}: {low:+.2f} to {high:+.2f})"


def main(arguments: list[str] | None = None) -> None:
    """Print a table per pair; the last line is one JSON object with the shares of gold kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs="+", default=["demo"], help="names in models/pairs.toml")
    parser.add_argument("--task", nargs="+", default=["niah_single_2", "niah_multikey_1"], choices=sorted(TASKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024])
    parser.add_argument("--keep", nargs="+", default=["0.1", "0.2"])
    parser.add_argument(
        "--chunks", nargs="+", type=int, default=[RULE.chunk_size], help="tokens; 32, the paper's, is always there"
    )
    parser.add_argument("-n", type=int, default=100, help="items per task and length")
    parser.add_argument("--calibrate", type=int, default=20, help="items before the first one, to choose a head by")
    parser.add_argument("--seed", type=int, default=30_000, help="number of the first item")
    options = parser.parse_args(arguments)
    report = {name: _examine(name, options) for name in options.pair}
    print(json.dumps(report))


def _examine(name: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    known = find_pair(name)
    reader = Reader(load_pair(known.target, known.draft, draft_layers=known.draft_layers))

    def reads(task: str, length: int, numbers: range) -> Iterator[Read]:
        for number in numbers:
            yield reader.read(make_item(TASKS[task], task, number, Space(length, reader.count)))

    before = range(options.seed - options.calibrate, options.seed)
    best = _best_head(list(reads(options.task[0], options.lengths[0], before)))
    numbers = range(options.seed, options.seed + options.n)
    sizes = sorted({*options.chunks, 32})
    outcomes = {
        f"{task}, {length} tokens": [
            _outcomes(read, options.keep, sizes, best) for read in reads(task, length, numbers)
        ]
        for task in options.task
        for length in options.lengths
    }
    print(f"\n{name}, N = {options.n} per column, best head {best}\n")
    _table(outcomes, options.keep)
    return {
        column: {" ".join(map(str, key)): float(np.mean([f[key] for f in found])) for key in found[0]}
        for column, found in outcomes.items()
    }


if __name__ == "__main__":
    main()
