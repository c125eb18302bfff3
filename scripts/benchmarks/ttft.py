"""Time to first token, sparse against full and against the limit of a sparse prefill, through one code path.

Both arms run the library's own stages on the same prompts, interleaved, in this process; the figures are medians over
the repetitions. The limit of a sparse prefill is what no implementation can avoid: reading the M prompt tokens with the
draft, within its window, and the kept tokens with the target. Both parts are measured here, as plain prefills of those
lengths:

    share_of_limit  = (T_draft(M) + T_target(kept)) / TTFT_sparse        1.0 is the best possible
    r               = T_draft(M) / T_target(M)
    speedup         = TTFT_full / TTFT_sparse
    rest_of_full    = (TTFT_sparse - T_draft(M) - T_target(kept)) / TTFT_full, what is neither of the two prefills

A draft with calibrated heads runs up to the last of them and does not look ahead; `--rule paper` runs all of it.
`--counts` times nothing: it counts the host's waits for the device in each step of the engine.

Models are a named pair, checkpoints or random weights in a real shape (`--shape`). All prefills read as many tokens per
forward (`--step`), by default those that the engine reads alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.progress import track

from mlx_specprefill import RULE_NAMES, Engine, EngineConfig, ModelPair, as_token_ids, keep_pct
from mlx_specprefill.adapters.depth import full_draft_model
from mlx_specprefill.adapters.window import WindowedReader
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.config import DraftWindow
from mlx_specprefill.engine.prefixes.caches import draft_window
from mlx_specprefill.selection.mapped import map_task
from mlx_specprefill.selection.plan import forced_mask, forced_ranges, template_mask
from mlx_specprefill.selection.question_lines import question_span
from mlx_specprefill.selection.scorer import Scores, ScoringInput, scorer_for
from mlx_specprefill.selection.selector import select_tokens, selection_by
from mlx_specprefill.selection.text import TextReader

from .harness import BenchError, pairs, shapes
from .harness.counts import count_steps
from .harness.figures import machine, rounded, show, show_rows, timed
from .harness.stages import decode_ms, finish, full_prefill, plain_prefill_ms, prefill

QUICK = {"keep": ["0.2"], "repeats": 2}
DECODED = 24  # tokens after each arm, for the decode rate
Run = dict[str, float]  # what one repetition measured: milliseconds, tokens per second


@dataclass(frozen=True)
class Setup:
    """The pair, and the tokens per forward for every arm."""

    pair: ModelPair
    config: EngineConfig
    step: int
    text: TextReader

    @property
    def window(self) -> DraftWindow | None:
        return None if self.config.rule == "paper" else draft_window(self.pair, self.config)

    @property
    def draft(self) -> Callable[..., mx.array]:
        """Return the draft as it reads a prompt."""
        assert self.pair.draft is not None
        return self.pair.draft if self.window is None else WindowedReader(self.pair.draft, self.window)


def first_token(logits: mx.array) -> int:
    return int(np.array(mx.argmax(logits, axis=-1))[0])


def full_arm(setup: Setup, prompt: list[int]) -> Run:
    """Time a prefill of the whole prompt, then some decoding."""
    target = setup.pair.target
    cache = make_positioned_cache(target)
    prefill_ms, logits = timed(lambda: full_prefill(target, cache, prompt, setup.step))
    token_ms, _ = timed(lambda: first_token(logits))
    tps = 1e3 / decode_ms(target, cache, logits, DECODED)
    return {"full_ttft_ms": prefill_ms + token_ms, "full_decode_tps": tps}


def score(setup: Setup, prompt: list[int]) -> Scores:
    """Score as the engine does."""
    pair, config = setup.pair, setup.config
    assert pair.draft is not None, "a pair to be timed has a draft"
    question = question_span(len(prompt), config.scoring)
    cache = list(make_prompt_cache(pair.draft))
    ids = np.asarray(prompt, dtype=np.int32)
    template = template_mask((), question, np.ones(ids.size, dtype=np.bool_))
    window = setup.window
    task = ScoringInput(ids, question, template, pair.eos_token_ids, cache, lambda: setup.step, window=window)
    scorer = scorer_for(config.rule, pair.heads, config.scoring)
    if pair.mapping is None:
        return finish(scorer.score(pair.draft, task))
    mapped = map_task(pair.mapping, task)
    return mapped.scores(finish(scorer.score(pair.draft, mapped.task)))


def select(setup: Setup, prompt: list[int], importance: np.ndarray, keep: Fraction) -> np.ndarray:
    rule = selection_by(setup.config.rule, setup.config.selection)
    forced = forced_mask(forced_ranges((), importance.size, rule), importance.size)
    return select_tokens(importance, forced, setup.text.read(as_token_ids(prompt)), keep, rule).kept


def sparse_arm(setup: Setup, prompt: list[int], keep: Fraction) -> Run:
    """Time the stages of a sparse request and their sum, then some decoding."""
    target = setup.pair.target
    draft_ms, scores = timed(lambda: score(setup, prompt))
    select_ms, kept = timed(lambda: select(setup, prompt, scores.importance, keep))
    cache = make_positioned_cache(target)
    prefill_ms, logits = timed(lambda: prefill(target, cache, prompt, kept, setup.step))
    token_ms, _ = timed(lambda: first_token(logits))
    return {
        "draft_ms": draft_ms,
        "select_ms": select_ms,
        "prefill_ms": prefill_ms,
        "first_token_ms": token_ms,
        "sparse_ttft_ms": draft_ms + select_ms + prefill_ms + token_ms,
        "kept_tokens": float(kept.size),
        "sparse_decode_tps": 1e3 / decode_ms(target, cache, logits, DECODED),
    }


def repetition(setup: Setup, prompt: list[int], shares: list[Fraction]) -> list[Run]:
    """Time full prefill, then sparse and its limit for every keep share. Return one run per share, with its ratios."""
    pair, full = setup.pair, full_arm(setup, prompt)
    draft_alone = plain_prefill_ms(pair.draft, prompt, setup.step, setup.draft)
    runs = []
    for keep in shares:
        run = full | sparse_arm(setup, prompt, keep)
        last = prompt[-int(run["kept_tokens"]) :]
        kept_alone = plain_prefill_ms(pair.target, last, setup.step)
        limit = draft_alone + kept_alone
        runs.append(
            run
            | {
                "draft_alone_ms": draft_alone,
                "target_kept_ms": kept_alone,
                "limit_ms": limit,
                "speedup": run["full_ttft_ms"] / run["sparse_ttft_ms"],
                "r": draft_alone / run["full_ttft_ms"],
                "share_of_limit": limit / run["sparse_ttft_ms"],
                "rest_of_full": (run["sparse_ttft_ms"] - limit) / run["full_ttft_ms"],
            }
        )
    return runs


def median_row(tokens: int, keep: Fraction, runs: Sequence[Run]) -> Run:
    """Return the medians of one prompt length and keep share."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"tokens": tokens, "keep": float(keep)} | medians | {"kept_tokens": int(medians["kept_tokens"])}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rule", default="default", choices=RULE_NAMES, help="how tokens are scored and chosen")
    parser.add_argument("--counts", action="store_true", help="count evaluations and waits, for prompts of 256 tokens")
    shapes.add_options(parser, None, layers=0, draft_layers=0, narrow=1)
    shapes.add_precision(parser)
    parser.add_argument("--step", type=int, help="tokens per forward; default: the engine's on this device")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="prompt tokens")
    parser.add_argument("--keep", nargs="+", default=["0.1", "0.2", "0.3", "0.5", "1.0"], help="shares in (0, 1]")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved repetitions")


def summary(rows: list[Run], setup: Setup) -> dict[str, Any]:
    """Return headline figures at the longest prompt and a keep of 0.2 (or the nearest measured), and every row."""
    pair, longest = setup.pair, max(row["tokens"] for row in rows)
    head = min((row for row in rows if row["tokens"] == longest), key=lambda row: abs(row["keep"] - 0.2))
    return {
        "benchmark": "ttft",
        **machine(),
        "target": pair.target_id,
        "draft": pair.draft_id,
        "rule": setup.config.rule,
        "dtype": pair.dtype,
        "step": setup.step,
        **{name: head[name] for name in ("tokens", "keep", "speedup", "r", "share_of_limit", "rest_of_full")},
        "rows": rows,
    }


def load(options: argparse.Namespace) -> ModelPair:
    if options.shape is None:
        return pairs.loaded(options, options.dtype)
    return shapes.random_pair(options, pairs.demo_tokenizer())


def run(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.lengths) < 64 or options.repeats < 1:
        raise BenchError("--lengths must be at least 64 tokens and --repeats at least 1")
    shares = [keep_pct(share, "--keep") for share in options.keep]
    pair, rng, config = load(options), np.random.default_rng(0), EngineConfig(rule=options.rule)
    if options.rule == "paper":
        pair = replace(pair, draft=full_draft_model(pair.draft), heads=None)
    if options.counts:
        with Engine(pair, replace(config, prefill_step=64, prefix_cache_bytes=0)) as engine:
            counts = [row for sparse in (False, True) for rows in (1, 4) for row in count_steps(engine, sparse, rows)]
        show_rows(counts)
        return {"benchmark": "ttft", **machine(), "counts": counts}
    setup = Setup(pair, config, options.step or config.prefill_step, TextReader(pair.tokenizer))
    vocabulary = min(pair.readable_vocab, len(pair.tokenizer.get_vocab()))  # an unknown id is decoded slowly
    repetition(setup, [int(token) for token in rng.integers(0, vocabulary, 512)], shares[:1])  # not counted
    rows = []
    for length in track(options.lengths, description="measuring", console=Console(stderr=True)):
        # What the prompt says does not change the time it takes.
        prompt = [int(token) for token in rng.integers(0, vocabulary, length)]
        runs = [repetition(setup, prompt, shares) for _ in range(options.repeats)]
        rows += [median_row(length, share, part) for share, part in zip(shares, zip(*runs, strict=True), strict=True)]
    table = [dict(row) for row in rows]
    heads = [f"{row.pop('tokens')}, keep {row.pop('keep'):g}" for row in table]
    show(("medians", *heads), [(name, *(row[name] for row in table)) for name in table[0]])
    return rounded(summary(rows, setup))
