#!/usr/bin/env python3
"""Time to first token, sparse against full, through one code path.

Both arms run the library's own stages on the same prompts, interleaved, in this process; the figures are medians. The
limit of a sparse prefill is what no implementation can avoid: reading the M prompt tokens with the draft and the kept
tokens with the target. Both parts are measured here, as plain prefills of those lengths:

    share_of_limit = (T_draft(M) + T_target(kept)) / TTFT_sparse        1.0 is the best possible
    r              = T_draft(M) / T_target(M)
    speedup        = TTFT_full / TTFT_sparse

The last line of the output is one JSON object.
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
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mlx_specprefill import BLAS, EngineConfig, ModelPair, SpecPrefillError, keep_pct, load_pair

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.prefill.forced import forced_mask, forced_ranges
from mlx_specprefill.prefill.scoring import score_prompt
from mlx_specprefill.prefill.selection import chunk_means, select_chunks
from mlx_specprefill.prefill.sparse import prefill

ROOT = Path(__file__).resolve().parent.parent
CONFIG = EngineConfig()


@dataclass(frozen=True)
class Row:
    """One prompt length and keep share; times in milliseconds, medians."""

    tokens: int
    keep: float
    kept_tokens: int
    full_ttft_ms: float
    sparse_ttft_ms: float
    draft_ms: float
    select_ms: float
    prefill_ms: float
    first_token_ms: float
    limit_ms: float
    speedup: float
    r: float
    share_of_limit: float


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


def full_prefill(model: Any, prompt: list[int]) -> mx.array:
    return finish(prefill(model, make_prompt_cache(model), prompt, None, CONFIG.prefill_step))


def full_arm(pair: ModelPair, prompt: list[int]) -> float:
    return timed(lambda: first_token(full_prefill(pair.target, prompt)))[0]


def sparse_arm(pair: ModelPair, prompt: list[int], keep: Fraction) -> dict[str, float]:
    """The four stages of a sparse request and their sum."""
    size = CONFIG.selection.chunk_size
    draft_ms, scores = timed(lambda: finish(score_prompt(pair.draft, prompt, CONFIG.scoring, pair.eos_token_ids)))

    def select() -> np.ndarray:
        forced = forced_mask(forced_ranges((), len(prompt), CONFIG.selection), len(prompt))
        return select_chunks(chunk_means(scores.importance, size), forced, keep, size).kept

    select_ms, kept = timed(select)
    prefill_ms, logits = timed(
        lambda: finish(prefill(pair.target, make_positioned_cache(pair.target), prompt, kept, CONFIG.prefill_step))
    )
    token_ms, _ = timed(lambda: first_token(logits))
    return {
        "draft_ms": draft_ms,
        "select_ms": select_ms,
        "prefill_ms": prefill_ms,
        "first_token_ms": token_ms,
        "sparse_ttft_ms": draft_ms + select_ms + prefill_ms + token_ms,
        "kept_tokens": float(kept.size),
    }


def limit_arm(pair: ModelPair, prompt: list[int], kept: int) -> dict[str, float]:
    """What no sparse prefill can avoid: the draft over everything, the target over as many tokens as were kept."""
    return {
        "draft_full_ms": timed(lambda: full_prefill(pair.draft, prompt))[0],
        "target_kept_ms": timed(lambda: full_prefill(pair.target, prompt[-kept:]))[0],
    }


def measure(pair: ModelPair, prompt: list[int], keep: Fraction, repeats: int) -> Row:
    """Both arms and the limit in turn, `repeats` times."""
    runs: list[dict[str, float]] = []
    for _ in range(repeats):
        run = sparse_arm(pair, prompt, keep)
        run |= limit_arm(pair, prompt, int(run["kept_tokens"]))
        run["full_ttft_ms"] = full_arm(pair, prompt)
        runs.append(run)
    m = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    limit = m["draft_full_ms"] + m["target_kept_ms"]
    return Row(
        tokens=len(prompt),
        keep=float(keep),
        kept_tokens=int(m["kept_tokens"]),
        full_ttft_ms=m["full_ttft_ms"],
        sparse_ttft_ms=m["sparse_ttft_ms"],
        draft_ms=m["draft_ms"],
        select_ms=m["select_ms"],
        prefill_ms=m["prefill_ms"],
        first_token_ms=m["first_token_ms"],
        limit_ms=limit,
        speedup=m["full_ttft_ms"] / m["sparse_ttft_ms"],
        r=m["draft_full_ms"] / m["full_ttft_ms"],
        share_of_limit=limit / m["sparse_ttft_ms"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(ROOT / "models/demo/target"))
    parser.add_argument("--draft", default=str(ROOT / "models/demo/draft"))
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


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="Time to first token, milliseconds (medians)")
    names = (
        "tokens",
        "keep",
        "kept",
        "full",
        "sparse",
        "draft",
        "select",
        "prefill",
        "limit",
        "r",
        "speed-up",
        "share",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        times = (row.full_ttft_ms, row.sparse_ttft_ms, row.draft_ms, row.select_ms, row.prefill_ms, row.limit_ms)
        shares = (f"{row.r:.3f}", f"{row.speedup:.2f}", f"{row.share_of_limit:.2f}")
        table.add_row(str(row.tokens), f"{row.keep:g}", str(row.kept_tokens), *(f"{t:.1f}" for t in times), *shares)
    console.print(table)


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
        "rows": [{k: round(v, 4) for k, v in asdict(row).items()} for row in rows],
    }


def main() -> int:
    options, console = arguments(), Console(stderr=True)
    try:
        shares = [keep_pct(share, "--keep") for share in options.keep]
        pair = load_pair(options.target, options.draft, dtype=options.dtype)
    except SpecPrefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rng = np.random.default_rng(0)
    measure(pair, [int(token) for token in rng.integers(0, pair.vocab_size, 512)], shares[0], 1)  # not counted
    cells = [(length, share) for length in options.lengths for share in shares]
    rows = []
    for length, share in track(cells, description="measuring", console=console):
        # What the prompt says does not change the time it takes.
        prompt = [int(token) for token in rng.integers(0, pair.vocab_size, length)]
        rows.append(measure(pair, prompt, share, options.repeats))
    show(rows, Console(width=110))
    print(json.dumps(summary(rows, pair)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
