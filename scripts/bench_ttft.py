#!/usr/bin/env python3
"""Time to first token, sparse against full, through one code path.

Both arms run the library's own stages on the same prompts, interleaved, in this process; the figures are medians. The
limit of a sparse prefill is what no implementation can avoid: reading the M prompt tokens with the draft and the kept
tokens with the target. Both parts are measured here, as plain prefills of those lengths:

    share_of_limit = (T_draft(M) + T_target(kept)) / TTFT_sparse        1.0 is the best possible
    r              = T_draft(M) / T_target(M)
    speedup        = TTFT_full / TTFT_sparse
    rest_of_full   = (TTFT_sparse - T_draft(M) - T_target(kept)) / TTFT_full, what is neither of the two prefills

Models are a checkpoint pair or random weights in a real shape (`--shape`). Before the cells, both models are calibrated
as at a server's start; the predictions are that calibration's, for the same step sizes.

The last line of the output is one JSON object; scripts/plot_ttft.py draws it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from random_pair import random_pair
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mlx_specprefill import BLAS, EngineConfig, ModelPair, SpecPrefillError, keep_pct, load_pair

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.decoding.autoregressive import decode
from mlx_specprefill.engine.calibration import calibrate
from mlx_specprefill.prefill.cost import PairCost
from mlx_specprefill.prefill.forced import forced_mask, forced_ranges
from mlx_specprefill.prefill.scoring import score_prompt
from mlx_specprefill.prefill.selection import chunk_means, select_chunks
from mlx_specprefill.prefill.sparse import prefill
from mlx_specprefill.sampling import greedy
from mlx_specprefill.shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent
CONFIG = EngineConfig()
DECODED = 24  # tokens after each arm, for the decode rate


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
    speedup: float
    r: float
    share_of_limit: float
    rest_of_full: float
    full_peak_mib: float
    sparse_peak_mib: float
    full_decode_tps: float
    sparse_decode_tps: float
    predicted_full_ms: float
    predicted_sparse_ms: float


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


def full_prefill(model: Any, cache: list[Any], prompt: list[int]) -> mx.array:
    return finish(prefill(model, cache, prompt, None, CONFIG.prefill_step))


def decode_tps(model: Any, cache: list[Any], logits: mx.array) -> float:
    """Tokens per second right after a prefill."""
    ms, _ = timed(lambda: list(decode(model, cache, logits, greedy, [], DECODED)))
    return 1e3 * DECODED / ms


def full_arm(pair: ModelPair, prompt: list[int]) -> dict[str, float]:
    """A prefill of everything, then some decoding."""
    mx.reset_peak_memory()
    before, cache = mx.get_active_memory(), make_positioned_cache(pair.target)
    prefill_ms, logits = timed(lambda: full_prefill(pair.target, cache, prompt))
    token_ms, _ = timed(lambda: first_token(logits))
    peak = (mx.get_peak_memory() - before) / 2**20
    tps = decode_tps(pair.target, cache, logits)
    return {"full_ttft_ms": prefill_ms + token_ms, "full_peak_mib": peak, "full_decode_tps": tps}


def score(pair: ModelPair, prompt: list[int]) -> tuple[float, Any]:
    """The draft's scores, and the milliseconds that followed its last slice of prompt tokens."""
    slices = score_prompt(pair.draft, prompt, CONFIG.scoring, pair.eos_token_ids)
    mark = time.perf_counter()
    while True:
        try:
            if next(slices).done < len(prompt):
                mark = time.perf_counter()
        except StopIteration as done:
            return 1e3 * (time.perf_counter() - mark), done.value


def sparse_arm(pair: ModelPair, prompt: list[int], keep: Fraction) -> dict[str, float]:
    """The stages of a sparse request and their sum, then some decoding."""
    size = CONFIG.selection.chunk_size
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    draft_ms, (lookahead_ms, scores) = timed(lambda: score(pair, prompt))

    def select() -> np.ndarray:
        forced = forced_mask(forced_ranges((), len(prompt), CONFIG.selection), len(prompt))
        return select_chunks(chunk_means(scores.importance, size), forced, keep, size).kept

    select_ms, kept = timed(select)
    cache = make_positioned_cache(pair.target)
    prefill_ms, logits = timed(lambda: finish(prefill(pair.target, cache, prompt, kept, CONFIG.prefill_step)))
    token_ms, _ = timed(lambda: first_token(logits))
    peak = (mx.get_peak_memory() - before) / 2**20
    return {
        "draft_ms": draft_ms,
        "lookahead_ms": lookahead_ms,
        "select_ms": select_ms,
        "prefill_ms": prefill_ms,
        "first_token_ms": token_ms,
        "sparse_ttft_ms": draft_ms + select_ms + prefill_ms + token_ms,
        "kept_tokens": float(kept.size),
        "sparse_peak_mib": peak,
        "sparse_decode_tps": decode_tps(pair.target, cache, logits),
    }


def limit_arm(pair: ModelPair, prompt: list[int], kept: int) -> dict[str, float]:
    """What no sparse prefill can avoid: the draft over everything, the target over as many tokens as were kept."""
    draft, target = pair.draft, pair.target
    return {
        "draft_alone_ms": timed(lambda: full_prefill(draft, make_prompt_cache(draft), prompt))[0],
        "target_kept_ms": timed(lambda: full_prefill(target, make_prompt_cache(target), prompt[-kept:]))[0],
    }


def measure(pair: ModelPair, cost: PairCost, prompt: list[int], keep: Fraction, repeats: int) -> Row:
    """Both arms and the limit in turn, `repeats` times."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        run = sparse_arm(pair, prompt, keep)
        run |= limit_arm(pair, prompt, int(run["kept_tokens"]))
        run |= full_arm(pair, prompt)
        runs.append(run)
    m = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    limit = m["draft_alone_ms"] + m["target_kept_ms"]
    step = CONFIG.prefill_step
    predicted = cost.predict(len(prompt), int(m["kept_tokens"]), step=step, draft_step=CONFIG.scoring.prefill_step)
    m["kept_tokens"] = int(m["kept_tokens"])
    return Row(
        tokens=len(prompt),
        keep=float(keep),
        **m,
        limit_ms=limit,
        speedup=m["full_ttft_ms"] / m["sparse_ttft_ms"],
        r=m["draft_alone_ms"] / m["full_ttft_ms"],
        share_of_limit=limit / m["sparse_ttft_ms"],
        rest_of_full=(m["sparse_ttft_ms"] - limit) / m["full_ttft_ms"],
        predicted_full_ms=predicted.full_ms,
        predicted_sparse_ms=predicted.sparse_ms,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(ROOT / "models/demo/target"))
    parser.add_argument("--draft", default=str(ROOT / "models/demo/draft"))
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
    "r": "r",
    "speed-up": "speedup",
    "share": "share_of_limit",
    "rest": "rest_of_full",
    "MiB": "full_peak_mib",
    "sparse MiB": "sparse_peak_mib",
    "tok/s": "full_decode_tps",
    "sparse tok/s": "sparse_decode_tps",
}


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Time to first token, milliseconds (medians)")
    for name in (*COLUMNS, "off full", "off sparse"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [number(getattr(row, name)) for name in COLUMNS.values()]
        table.add_row(*cells, *(f"{100 * error:+.0f} %" for error in errors(row)))
    console.print(table)


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}" if value < 20 else f"{value:.0f}"


def errors(row: Row) -> tuple[float, float]:
    """How far the predictions are off, relative to what was measured."""
    return row.predicted_full_ms / row.full_ttft_ms - 1, row.predicted_sparse_ms / row.sparse_ttft_ms - 1


def summary(rows: list[Row], pair: ModelPair) -> dict[str, Any]:
    """Headline figures at the longest prompt and a keep of 0.2 (or the nearest measured), and every row."""
    longest = max(row.tokens for row in rows)
    head = min((row for row in rows if row.tokens == longest), key=lambda row: abs(row.keep - 0.2))
    return {
        "benchmark": "ttft",
        "device": str(mx.default_device()),
        "blas": BLAS.library,
        "mlx": mx.__version__,
        "target": pair.target_id,
        "draft": pair.draft_id,
        "dtype": pair.dtype,
        "tokens": head.tokens,
        "keep": head.keep,
        "speedup": round(head.speedup, 3),
        "r": round(head.r, 4),
        "share_of_limit": round(head.share_of_limit, 4),
        "rest_of_full": round(head.rest_of_full, 4),
        "worst_prediction": round(max(abs(error) for row in rows for error in errors(row)), 4),
        "rows": [{k: round(v, 4) for k, v in asdict(row).items()} for row in rows],
    }


def load(options: argparse.Namespace) -> ModelPair:
    if options.shape is None:
        return load_pair(options.target, options.draft, dtype=options.dtype)
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
    cost = calibrate(pair, CONFIG)
    measure(pair, cost, [int(token) for token in rng.integers(0, pair.vocab_size, 512)], shares[0], 1)  # not counted
    cells = [(length, share) for length in options.lengths for share in shares]
    rows = []
    for length, share in track(cells, description="measuring", console=console):
        # What the prompt says does not change the time it takes.
        prompt = [int(token) for token in rng.integers(0, pair.vocab_size, length)]
        rows.append(measure(pair, cost, prompt, share, options.repeats))
    show(rows, Console(width=160))
    print(json.dumps(summary(rows, pair)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
