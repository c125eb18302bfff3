"""Long prompts through the engine, from 16K tokens on: time, memory, and the time outside the two models.

Per length, full and sparse requests take turns, each from an empty cache: the time from `Engine.submit` to the first
token, and the allocator's peak above what was held before. The draft alone over the prompt, and the target alone over
as many tokens as were kept, run on mlx-lm's own caches in the same repetition. What a sparse request takes beyond these
two is the rest: text reading, scores, selection, cache lookup, copies and accounting.

    rest_of_full     rest / time in full; the aim is .02
    peak_ratio       the peak of a sparse request over that of a full one; the aim is 1.05
    hit_ms           a second question behind the whole prompt, which the prefix cache holds
    exponents        of time, rest and peak over the length, fitted; 1 is linear, 2 is attention

Weights are random, in the shape of a real model (`--shape`); the default is a narrow one of real lengths. The draft
scores with one head, as after calibration. The text is the running Python's own documentation and sources.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.request import as_token_ids
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill_evals.corpus import modules, paragraphs

from .harness import BenchError, pairs, shapes
from .harness.figures import machine, rounded, show_rows
from .harness.stages import plain_prefill_ms

QUICK = {"lengths": [8192, 16384], "repeats": 1}
STEP = 2048  # tokens per forward, for every arm
ANSWER = 2  # tokens
FITTED = ("full_ms", "sparse_ms", "rest_ms", "full_peak_mib", "sparse_peak_mib")


def pair_of(options: argparse.Namespace, tokenizer: TokenizerWrapper) -> ModelPair:
    vocabulary, context = len(tokenizer.get_vocab()), 2 * max(options.lengths)
    pair = shapes.random_pair(options, tokenizer, vocab_size=vocabulary, max_position_embeddings=context)
    if pair.sparse_refusal is not None:
        raise BenchError(pair.sparse_refusal)
    attention = [
        part for part in leaves(list(make_prompt_cache(pair.draft))) if isinstance(part, KVCache | RotatingKVCache)
    ]
    call = next(number for number, part in enumerate(attention) if isinstance(part, KVCache))
    depth = len(pair.draft.layers)
    return replace(pair, heads=DraftHeads((Head(call, 0, 1.0),), depth, depth, {}))  # as calibration leaves a draft


def prompt_of(tokenizer: TokenizerWrapper, tokens: int, seed: int) -> list[int]:
    """Return so many tokens of text. The first ones differ by seed, so that no two prompts begin alike."""
    ids: list[int] = tokenizer.encode(f"{seed}. ", add_special_tokens=False)
    texts = [*(one.text for one in paragraphs()), *(module.source for module in modules())]
    at = seed * 97
    while len(ids) < tokens:
        ids += tokenizer.encode(texts[at % len(texts)] + "\n\n", add_special_tokens=False)
        at += 1
    return ids[:tokens]


# --- one request -----------------------------------------------------------------------------------------------------


def asked(engine: Engine, prompt: list[int], sparse: bool) -> dict[str, float]:
    """Return the milliseconds to the first token, the peak in MiB, and the number of tokens the target read."""
    options = SpecPrefillOptions(enabled=sparse, keep_pct=None)
    request = GenerationRequest(as_token_ids(prompt), max_tokens=ANSWER, specprefill=options)
    mx.clear_cache()
    held, begun, first = mx.get_active_memory(), time.perf_counter(), None
    mx.reset_peak_memory()
    for event in engine.generate(request):
        if isinstance(event, TokenEvent) and first is None:
            first = 1e3 * (time.perf_counter() - begun)
        if isinstance(event, Finished):
            report = event.report
    if first is None:
        raise BenchError("an answer without a token")
    if (report.mode == "sparse") != sparse:
        raise BenchError(f"the request ran otherwise than asked: {report.reason}")
    peak = (mx.get_peak_memory() - held) / 2**20
    return {"ms": first, "peak_mib": peak, "kept": report.kept_tokens, "cached": report.cached_tokens}


def repetition(engine: Engine, prompt: list[int]) -> dict[str, float]:
    """Measure both prefills, the models alone, and a hit of the prefix cache."""
    pair = engine.pair
    full = asked(engine, prompt, sparse=False)
    hit = asked(engine, [*prompt, *prompt[:16]], sparse=False)
    if hit["cached"] < len(prompt) - 1:
        raise BenchError(f"the prefix cache held {hit['cached']:.0f} of {len(prompt)} tokens")
    engine.drop_cached()
    sparse = asked(engine, prompt, sparse=True)
    engine.drop_cached()
    draft_ms = plain_prefill_ms(pair.draft, prompt, STEP)
    target_ms = plain_prefill_ms(pair.target, prompt[: int(sparse["kept"])], STEP)
    rest = sparse["ms"] - draft_ms - target_ms
    return {
        "full_ms": full["ms"],
        "sparse_ms": sparse["ms"],
        "draft_alone_ms": draft_ms,
        "target_kept_ms": target_ms,
        "kept_tokens": sparse["kept"],
        "rest_ms": rest,
        "rest_of_full": rest / full["ms"],
        "full_peak_mib": full["peak_mib"],
        "sparse_peak_mib": sparse["peak_mib"],
        "peak_ratio": sparse["peak_mib"] / full["peak_mib"],
        "hit_ms": hit["ms"],
    }


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536], help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=2)
    shapes.add_options(parser, "llama-3.1-8b", layers=4, draft_layers=2, narrow=32)
    shapes.add_precision(parser)


def run(options: argparse.Namespace) -> dict[str, Any]:
    if min(options.lengths) < 1024 or options.repeats < 1:
        raise BenchError("--lengths must be at least 1024 tokens and --repeats at least 1")
    tokenizer = pairs.demo_tokenizer()
    policy = SpecPrefillPolicy(threshold=512, densify=False)
    config = EngineConfig(policy=policy, prefill_step=STEP, prefix_cache_bytes=32 << 30)
    with Engine(pair_of(options, tokenizer), config) as engine:
        repetition(engine, prompt_of(tokenizer, 1024, 0))  # compiles; not counted
        rows = [measured(engine, tokenizer, length, options.repeats) for length in options.lengths]
    show_rows(rows)
    report: dict[str, Any] = rounded(summary(rows, options))
    return report


def measured(engine: Engine, tokenizer: TokenizerWrapper, length: int, repeats: int) -> dict[str, Any]:
    """Return the medians over the repetitions."""
    runs = [repetition(engine, prompt_of(tokenizer, length, repeat + 1)) for repeat in range(repeats)]
    print(f"{length} tokens: {runs[-1]['full_ms'] / 1e3:.1f} s in full", file=sys.stderr, flush=True)
    return {"tokens": length, **{name: statistics.median(run[name] for run in runs) for name in runs[0]}}


def summary(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "long",
        **machine(),
        **{name: vars(options)[name] for name in ("shape", "layers", "draft_layers", "narrow", "dtype", "quantised")},
        "repeats": options.repeats,
        "rest_share_max": max(row["rest_of_full"] for row in rows),
        "peak_ratio_max": max(row["peak_ratio"] for row in rows),
        "exponents": {name: exponent(rows, name) for name in FITTED},
        "rows": rows,
    }


def exponent(rows: list[dict[str, Any]], name: str) -> float | None:
    """Fit a figure's exponent over the length by least squares on logarithms.

    Return None with one length, or where a value isn't positive.
    """
    if len(rows) < 2 or any(row[name] <= 0 for row in rows):
        return None
    slope, _ = np.polyfit(np.log([row["tokens"] for row in rows]), np.log([row[name] for row in rows]), 1)
    return float(slope)
