#!/usr/bin/env python3
"""Time to first token, sparse against full, through one code path.

Both arms run the library's own stages on the same prompts, interleaved, in this process; the figures are medians over
the repetitions. The limit of a sparse prefill is what no implementation can avoid: reading the M prompt tokens with the
draft and the kept tokens with the target. Both parts are measured here, as plain prefills of those lengths:

    share_of_limit  = (T_draft(M) + T_target(kept)) / TTFT_sparse        1.0 is the best possible
    r               = T_draft(M) / T_target(M)
    speedup         = TTFT_full / TTFT_sparse
    rest_of_full    = (TTFT_sparse - T_draft(M) - T_target(kept)) / TTFT_full, what is neither of the two prefills
    between_of_full = (look-ahead and scores, selection, first token) / TTFT_full, the same by the clock of each stage
    whole_limit     = what T_draft(M) + T_target(kept) would be with all layers of a draft that ends early
    between_growth  = exponent of that time over the prompt length, between the two longest; 1 is linear

A draft with calibrated heads (`heads.json` beside it) runs up to the last of them and does not look ahead; `--rule
paper` runs all of it.

Memory is what the arms hold beside the weights: the KV caches when the prefill is done, what the look-ahead needs
beyond the draft's cache, and the allocator's peak up to the first token.

Models are a named pair, checkpoints or random weights in a real shape (`--shape`). Before the cells, both models are
calibrated as at a server's start; the step sizes and the predictions are that calibration's.

The last line of the output is one JSON object; scripts/plot_ttft.py draws it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import named_pair
import numpy as np
from random_pair import random_pair
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mlx_specprefill import BLAS, RULE_NAMES, EngineConfig, ModelPair, SpecPrefillError, keep_pct

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.depth import whole_draft
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache
from mlx_specprefill.engine.admission.cost import PairCost
from mlx_specprefill.engine.admission.time_calibration import calibrate
from mlx_specprefill.engine.autoregressive import decode
from mlx_specprefill.sampling import greedy
from mlx_specprefill.shapes import SHAPES
from mlx_specprefill.specprefill.forced import forced_mask, forced_ranges
from mlx_specprefill.specprefill.scorer import ToScore
from mlx_specprefill.specprefill.scorers import scorer_for
from mlx_specprefill.specprefill.selector import select_tokens
from mlx_specprefill.specprefill.sparse_prefill import prefill
from mlx_specprefill.specprefill.text import TextReader

DECODED = 24  # tokens after each arm, for the decode rate
Run = dict[str, float]  # what one repetition measured


@dataclass(frozen=True)
class Row:
    """One prompt length and keep share. Times are milliseconds, rates tokens per second, memory MiB; all medians."""

    tokens: int
    keep: float
    kept_tokens: int
    full_ttft_ms: float
    sparse_ttft_ms: float
    draft_ms: float
    lookahead_ms: float
    select_ms: float
    prefill_ms: float
    first_token_ms: float
    draft_alone_ms: float
    target_kept_ms: float
    limit_ms: float
    whole_draft_alone_ms: float
    whole_limit_ms: float
    speedup: float
    r: float
    share_of_limit: float
    rest_of_full: float
    between_ms: float
    between_of_full: float
    full_peak_mib: float
    sparse_peak_mib: float
    full_kv_mib: float
    sparse_kv_mib: float
    draft_kv_mib: float
    scoring_mib: float
    full_decode_tps: float
    sparse_decode_tps: float
    predicted_full_ms: float
    predicted_sparse_ms: float


@dataclass(frozen=True)
class Setup:
    """The pair, what it was measured to cost, and the tokens per forward that follow from that, for every arm."""

    pair: ModelPair
    config: EngineConfig
    cost: PairCost
    target_step: int
    draft_step: int
    text: TextReader


def set_up(pair: ModelPair, config: EngineConfig) -> Setup:
    if config.rule == "paper":
        pair = replace(pair, draft=whole_draft(pair.draft), heads=None)
    cost = calibrate(pair, config)
    return Setup(pair, config, cost, *cost.steps(config.prefill_step), TextReader(pair.tokenizer))


def finish(stages: Any) -> Any:
    """Run a stage to its result."""
    while True:
        try:
            next(stages)
        except StopIteration as done:
            return done.value


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = work()
    return 1e3 * (time.perf_counter() - begun), result


def first_token(logits: mx.array) -> int:
    return int(np.array(mx.argmax(logits, axis=-1))[0])


def full_prefill(model: Any, cache: list[Any], prompt: list[int], step: int) -> mx.array:
    return finish(prefill(model, cache, prompt, None, step))


def decode_tps(model: Any, cache: list[Any], logits: mx.array) -> float:
    """Tokens per second right after a prefill."""
    ms, _ = timed(lambda: list(decode(model, cache, logits, greedy, [], DECODED)))
    return 1e3 * DECODED / ms


def held_mib(cache: list[Any]) -> float:
    """What a cache's arrays take, with the room that they have grown."""
    arrays = [value for part in leaves(cache) for _, value in tree_flatten(part.state) if isinstance(value, mx.array)]
    return sum(int(array.nbytes) for array in arrays) / 2**20


class Peak:
    """The allocator's highest mark above what was in use at the start, in MiB; in parts, each with its own mark."""

    def __init__(self) -> None:
        self._start = self._part = mx.get_active_memory()
        self._highest = 0
        mx.reset_peak_memory()

    def part(self) -> float:
        """What the part that ends now needed beyond what was in use when it began."""
        self._highest = max(self._highest, mx.get_peak_memory())
        needed = mx.get_peak_memory() - self._part
        self._part = mx.get_active_memory()
        mx.reset_peak_memory()
        return needed / 2**20

    def highest(self) -> float:
        self.part()
        return (self._highest - self._start) / 2**20


def full_arm(setup: Setup, prompt: list[int]) -> Run:
    """A prefill of everything, then some decoding."""
    target = setup.pair.target
    peak, cache = Peak(), make_positioned_cache(target)
    prefill_ms, logits = timed(lambda: full_prefill(target, cache, prompt, setup.target_step))
    token_ms, _ = timed(lambda: first_token(logits))
    run = {"full_ttft_ms": prefill_ms + token_ms, "full_peak_mib": peak.highest(), "full_kv_mib": held_mib(cache)}
    return run | {"full_decode_tps": decode_tps(target, cache, logits)}


def score(setup: Setup, prompt: list[int], peak: Peak) -> tuple[Run, np.ndarray]:
    """The stages of the draft, and its importance; its cache is gone afterwards, as in the engine."""
    begun = mark = time.perf_counter()
    pair, config = setup.pair, setup.config
    stops, step = pair.eos_token_ids, lambda: setup.draft_step
    task = ToScore.alone(pair.draft, prompt, config.scoring, stop_ids=stops, step=step)
    slices = scorer_for(config.rule, pair.heads, config.scoring).score(pair.draft, task)
    while True:
        try:
            # The paper's scorer reads the last token with the look-ahead, which counts as one stage.
            if next(slices).done < len(prompt) or pair.heads is not None:
                peak.part()
                mark = time.perf_counter()
        except StopIteration as done:
            end, scores = time.perf_counter(), done.value
            break
    run = {"draft_ms": 1e3 * (end - begun), "lookahead_ms": 1e3 * (end - mark), "scoring_mib": peak.part()}
    return run | {"draft_kv_mib": held_mib(scores.cache)}, scores.importance


def select(setup: Setup, prompt: list[int], importance: np.ndarray, keep: Fraction) -> np.ndarray:
    rule = setup.config.selection_by(setup.config.rule)
    forced = forced_mask(forced_ranges((), importance.size, rule), importance.size)
    return select_tokens(importance, forced, setup.text.read(prompt), keep, rule).kept


def sparse_arm(setup: Setup, prompt: list[int], keep: Fraction) -> Run:
    """The stages of a sparse request and their sum, then some decoding."""
    target, peak = setup.pair.target, Peak()
    run, importance = score(setup, prompt, peak)
    select_ms, kept = timed(lambda: select(setup, prompt, importance, keep))
    cache = make_positioned_cache(target)
    prefill_ms, logits = timed(lambda: finish(prefill(target, cache, prompt, kept, setup.target_step)))
    token_ms, _ = timed(lambda: first_token(logits))
    return run | {
        "select_ms": select_ms,
        "prefill_ms": prefill_ms,
        "first_token_ms": token_ms,
        "sparse_ttft_ms": run["draft_ms"] + select_ms + prefill_ms + token_ms,
        "between_ms": run["lookahead_ms"] + select_ms + token_ms,
        "kept_tokens": float(kept.size),
        "sparse_peak_mib": peak.highest(),
        "sparse_kv_mib": held_mib(cache),
        "sparse_decode_tps": decode_tps(target, cache, logits),
    }


def alone(model: Any, prompt: list[int], step: int) -> float:
    """Milliseconds of a plain prefill."""
    return timed(lambda: full_prefill(model, make_prompt_cache(model), prompt, step))[0]


def repetition(setup: Setup, prompt: list[int], shares: list[Fraction]) -> list[Run]:
    """Full, then sparse and its limit for every keep share: one run per share, with the ratios of this repetition."""
    pair, full = setup.pair, full_arm(setup, prompt)
    draft_alone = whole_alone = alone(pair.draft, prompt, setup.draft_step)
    if (whole := whole_draft(pair.draft)) is not pair.draft:
        whole_alone = alone(whole, prompt, setup.draft_step)
    runs = []
    for keep in shares:
        run = full | sparse_arm(setup, prompt, keep)
        kept_alone = alone(pair.target, prompt[-int(run["kept_tokens"]) :], setup.target_step)
        limit = draft_alone + kept_alone
        runs.append(
            run
            | {
                "draft_alone_ms": draft_alone,
                "target_kept_ms": kept_alone,
                "limit_ms": limit,
                "whole_draft_alone_ms": whole_alone,
                "whole_limit_ms": whole_alone + kept_alone,
                "speedup": run["full_ttft_ms"] / run["sparse_ttft_ms"],
                "r": draft_alone / run["full_ttft_ms"],
                "share_of_limit": limit / run["sparse_ttft_ms"],
                "rest_of_full": (run["sparse_ttft_ms"] - limit) / run["full_ttft_ms"],
                "between_of_full": run["between_ms"] / run["full_ttft_ms"],
            }
        )
    return runs


def row(setup: Setup, tokens: int, keep: Fraction, runs: Sequence[Run]) -> Row:
    medians: dict[str, Any] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    kept = int(medians.pop("kept_tokens"))
    predicted = setup.cost.predict(tokens, kept, steps=(setup.target_step, setup.draft_step))
    return Row(
        tokens=tokens,
        keep=float(keep),
        kept_tokens=kept,
        **medians,
        predicted_full_ms=predicted.full_ms,
        predicted_sparse_ms=predicted.sparse_ms,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    named_pair.add_options(parser)
    parser.add_argument("--rule", default="default", choices=RULE_NAMES, help="how tokens are scored and chosen")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights in this shape, instead of checkpoints")
    parser.add_argument("--layers", type=int, help="of a shape's target; the draft gets the same share of its own")
    parser.add_argument("--experts", type=int, help="per expert layer of a shape; the work per token stays")
    parser.add_argument("--narrow", type=int, default=1, help="divide a shape's widths, for machines without a GPU")
    parser.add_argument("--quantised", action="store_true", help="a shape at its usual bits per weight")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="prompt tokens")
    parser.add_argument("--keep", nargs="+", default=["0.1", "0.2", "0.3", "0.5", "1.0"], help="shares in (0, 1]")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions")
    parser.add_argument("--quick", action="store_true", help="keep 0.2 only, twice; under three minutes")
    options = parser.parse_args()
    if options.quick:
        options.keep, options.repeats = ["0.2"], 2
    if min(options.lengths) < 64 or options.repeats < 1:
        parser.error("lengths must be at least 64 tokens and repeats at least 1")
    return options


COLUMNS = {
    "tokens": "tokens",
    "keep": "keep",
    "full": "full_ttft_ms",
    "sparse": "sparse_ttft_ms",
    "draft": "draft_ms",
    "look-ahead": "lookahead_ms",
    "select": "select_ms",
    "prefill": "prefill_ms",
    "limit": "limit_ms",
    "whole": "whole_limit_ms",
    "r": "r",
    "speed-up": "speedup",
    "share": "share_of_limit",
    "rest": "rest_of_full",
    "between": "between_of_full",
    "MiB": "full_peak_mib",
    "sparse MiB": "sparse_peak_mib",
    "tok/s": "full_decode_tps",
    "sparse tok/s": "sparse_decode_tps",
}


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Time to first token, milliseconds (medians)")
    for name in (*COLUMNS, "predicted: full", "sparse"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [number(getattr(row, name)) for name in COLUMNS.values()]
        table.add_row(*cells, *(f"{ratio:.2f}" for ratio in predictions(row)))
    console.print(table)
    print("Predictions are in shares of what was measured.")


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}" if value < 20 else f"{value:.0f}"


def predictions(row: Row) -> tuple[float, float]:
    """Predicted over measured time, full and sparse."""
    return row.predicted_full_ms / row.full_ttft_ms, row.predicted_sparse_ms / row.sparse_ttft_ms


def summary(rows: list[Row], setup: Setup) -> dict[str, Any]:
    """Headline figures at the longest prompt and a keep of 0.2 (or the nearest measured), and every row."""
    pair, longest = setup.pair, max(row.tokens for row in rows)
    head = min((row for row in rows if row.tokens == longest), key=lambda row: abs(row.keep - 0.2))
    return {
        "benchmark": "ttft",
        "device": str(mx.default_device()),
        "blas": BLAS.library,
        "mlx": mx.__version__,
        "target": pair.target_id,
        "draft": pair.draft_id,
        "rule": setup.config.rule,
        "dtype": pair.dtype,
        "target_step": setup.target_step,
        "draft_step": setup.draft_step,
        "tokens": head.tokens,
        "keep": head.keep,
        "speedup": round(head.speedup, 3),
        "r": round(head.r, 4),
        "share_of_limit": round(head.share_of_limit, 4),
        "limit_of_whole": round(head.limit_ms / head.whole_limit_ms, 4),
        "rest_of_full": round(head.rest_of_full, 4),
        "between_of_full": round(head.between_of_full, 4),
        "between_growth": growth(rows, head.keep),
        "target_weights_mib": round(weights_mib(pair.target), 1),
        "draft_weights_mib": round(weights_mib(pair.draft), 1),
        "worst_prediction": round(max(abs(ratio - 1) for row in rows for ratio in predictions(row)), 4),
        "rows": [{name: round(value, 4) for name, value in asdict(row).items()} for row in rows],
    }


def growth(rows: list[Row], keep: float) -> float | None:
    """Exponent of the time between the two prefills over the prompt length; None with a single length."""
    last = sorted((row for row in rows if row.keep == keep), key=lambda row: row.tokens)[-2:]
    if len(last) < 2:
        return None
    return round(math.log(last[1].between_ms / last[0].between_ms) / math.log(last[1].tokens / last[0].tokens), 3)


def weights_mib(model: Any) -> float:
    return sum(int(array.nbytes) for _, array in tree_flatten(model.parameters())) / 2**20


def load(options: argparse.Namespace) -> ModelPair:
    if options.shape is None:
        return named_pair.loaded(options, options.dtype)
    dtype = "float32" if options.dtype == "auto" else options.dtype
    return random_pair(options.shape, options.layers, options.experts, options.narrow, dtype, options.quantised)


def main() -> int:
    options, console = arguments(), Console(stderr=True)
    try:
        shares = [keep_pct(share, "--keep") for share in options.keep]
        pair = load(options)
    except SpecPrefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(0)
    setup = set_up(pair, EngineConfig(rule=options.rule))
    repetition(setup, [int(token) for token in rng.integers(0, pair.vocab_size, 512)], shares[:1])  # not counted
    rows = []
    for length in track(options.lengths, description="measuring", console=console):
        # What the prompt says does not change the time it takes.
        prompt = [int(token) for token in rng.integers(0, pair.vocab_size, length)]
        runs = [repetition(setup, prompt, shares) for _ in range(options.repeats)]
        rows += [row(setup, length, share, part) for share, part in zip(shares, zip(*runs, strict=True), strict=True)]
    show(rows, Console(width=200))
    print(json.dumps(summary(rows, setup)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
