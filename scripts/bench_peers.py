#!/usr/bin/env python3
"""This server beside others on one checkpoint: the same prompts through the same client, interleaved, in one run.

    cold     time to first token of prompts that nobody has seen
    warm     the same for a second question behind a shared prefix of that length
    decode   tokens per second of one answer after its first token
    streams  tokens per second of 1, 4 and 8 answers at once
    load     requests that arrive at random moments at a given rate: mean time to first token, a timeout counting as
             that much time (SpecPrefill, figure 1)

Arms: ours in full, ours sparse, `mlx_lm.server`, and `vllm-mlx` with its own sparse prefill and without, if
`--vllm-mlx` names its executable (it needs an environment of its own). All get the same float32 copy of the checkpoint
and the same BLAS. Ratios are medians over the repetitions with 95 % bootstrap intervals; above 1 ours is faster. The
last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from servers import DENSE, ROOT, BenchError, Reply, Server, Text, copy_checkpoint, module, preload, running, user

from mlx_specprefill import BLAS

SPARSE = {"specprefill": True, "specprefill_keep_pct": 0.2}
OURS = "ours, full"
STREAMS = (1, 4, 8)
TIMEOUT_S = 15.0


@dataclass
class Arm:
    """A server and how it is asked."""

    name: str
    server: Server
    options: dict[str, Any]
    failure: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)

    def ask(self, text: str, tokens: int) -> Reply:
        return self.server.ask(user(text), tokens, **self.options)


def cold(arm: Arm, text: Text, length: int) -> None:
    arm.add(f"cold {length} ms", 1e3 * arm.ask(text.of(length), 2).first_s)


def warm(arm: Arm, text: Text, length: int) -> None:
    shared = text.of(length)
    arm.ask(f"{shared} {text.of(20)}", 2)
    arm.add(f"warm {length} ms", 1e3 * arm.ask(f"{shared} {text.of(20)}", 2).first_s)


def decode(arm: Arm, text: Text, length: int, tokens: int) -> None:
    reply = arm.ask(text.of(length), tokens)
    arm.add(f"decode after {length} tok/s", (reply.completion_tokens - 1) / (reply.total_s - reply.first_s))


def streams(arm: Arm, text: Text, tokens: int) -> None:
    for count in STREAMS:
        prompts = [text.of(40) for _ in range(count)]
        begun = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            replies = list(pool.map(lambda prompt: arm.ask(prompt, tokens), prompts))
        total = sum(reply.completion_tokens for reply in replies)
        arm.add(f"{count} streams tok/s", total / (time.perf_counter() - begun))


def load(arm: Arm, text: Text, length: int, rate: float, count: int, seed: int) -> None:
    """`count` requests, Poisson at `rate` per second, the same moments for every arm."""
    rng, at, moments = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        moments.append(at)
    prompts, begun = [text.of(length) for _ in moments], time.perf_counter()

    def one(moment: float, prompt: str) -> float:
        time.sleep(max(0.0, begun + moment - time.perf_counter()))
        try:
            return min(arm.ask(prompt, 2).first_s, TIMEOUT_S)
        except (BenchError, httpx.HTTPError):
            return TIMEOUT_S

    with ThreadPoolExecutor(count) as pool:
        times = list(pool.map(one, moments, prompts))
    arm.add(f"load {rate:g}/s ms", 1e3 * statistics.mean(times))


def attempt(arm: Arm, work: Any, *arguments: Any) -> None:
    """A peer that fails is out of the rest of the run, with the reason."""
    if arm.failure:
        return
    try:
        work(arm, *arguments)
    except (BenchError, httpx.HTTPError, ZeroDivisionError) as error:
        arm.failure = f"{work.__name__}: {type(error).__name__}: {str(error)[:200]}"
        print(f"note: {arm.name} drops out: {arm.failure}", file=sys.stderr)


def measure(arms: Sequence[Arm], options: argparse.Namespace) -> None:
    """Every measurement on every arm in turn, again and again: what disturbs the machine disturbs all of them."""
    text = Text(0)
    text.calibrate(arms[0].server)
    for arm in arms:  # not counted: first requests compile and load
        attempt(arm, lambda arm: arm.ask(text.of(600), 4))
    for repeat in range(options.repeats):
        for length in options.lengths:
            for work in (cold, warm):
                for arm in arms:
                    attempt(arm, work, text, length)
            for arm in arms:
                attempt(arm, decode, text, length, options.tokens)
        for arm in arms:
            attempt(arm, streams, text, options.tokens)
        print(f"repetition {repeat + 1} of {options.repeats} done", file=sys.stderr, flush=True)
    for rate in options.rates:
        for arm in arms:
            attempt(arm, load, text, options.load_length, rate, options.load_requests, 1)


def ratio(ours: list[float], theirs: list[float], faster_is_more: bool) -> tuple[float, float, float]:
    """How much faster ours is, with the 95 % interval of a paired bootstrap of the median."""
    pairs = np.array([(a / b if faster_is_more else b / a) for a, b in zip(ours, theirs, strict=True)])
    draws = np.random.default_rng(0).choice(pairs, (2000, pairs.size))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(pairs)), float(low), float(high)


def ratios(arms: Sequence[Arm]) -> dict[str, dict[str, list[float]]]:
    """Ours in full and ours sparse over every other arm, per figure."""
    table: dict[str, dict[str, list[float]]] = {}
    for mine in arms[:2]:
        for other in arms:
            if other is mine or (other.name == "ours, sparse"):
                continue
            shared = [name for name in mine.figures if len(other.figures.get(name, ())) == len(mine.figures[name])]
            table[f"{mine.name} / {other.name}"] = {
                name: [round(x, 3) for x in ratio(mine.figures[name], other.figures[name], "tok/s" in name)]
                for name in shared
            }
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "models/demo/target")
    parser.add_argument("--draft", type=Path, default=ROOT / "models/demo/draft")
    parser.add_argument("--vllm-mlx", type=Path, help="the executable of vllm-mlx, in an environment of its own")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer when decoding is compared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.25, 0.5, 1.0], help="requests per second")
    parser.add_argument("--load-length", type=int, default=2048)
    parser.add_argument("--load-requests", type=int, default=12)
    parser.add_argument("--start-s", type=float, default=90.0)
    parser.add_argument("--quick", action="store_true", help="1K and 2K, three times, one rate")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.repeats, options.rates, options.load_requests = [1024, 2048], 3, [1.0], 8
    return options


def start(options: argparse.Namespace, stack: ExitStack, folder: Path) -> list[Arm]:
    """One process per server; the arms of one server share it."""
    target = copy_checkpoint(options.target, folder / "target")
    draft = copy_checkpoint(options.draft, folder / "draft")
    command = module("mlx_specprefill_server", "serve", "--target", str(target), "--draft", str(draft))
    more = ["--dtype", "float32", "--specprefill-threshold", "512", "--no-densify"]
    ours = stack.enter_context(running("ours", command + more, folder / "ours.log", options.start_s))
    command = module("mlx_lm.server", "--model", str(target))
    lm = stack.enter_context(running("mlx_lm.server", command, folder / "lm.log", options.start_s, **preload()))
    arms = [Arm(OURS, ours, DENSE), Arm("ours, sparse", ours, SPARSE), Arm("mlx_lm.server", lm, {})]
    if options.vllm_mlx:
        command = [str(options.vllm_mlx), "serve", str(target)]
        sparse = ["--specprefill", "--specprefill-draft-model", str(draft), "--specprefill-threshold", "512"]
        batching = ["--continuous-batching"]  # which turns its sparse prefill off
        for name, extra, asked in (("vllm-mlx, sparse", sparse, SPARSE), ("vllm-mlx, full", batching, DENSE)):
            log = folder / f"{name.replace(', ', '-')}.log"
            server = stack.enter_context(
                running(name, command + extra, log, options.start_s, model=str(target), **preload())
            )
            arms.append(Arm(name, server, asked))
    return arms


def show(arms: Sequence[Arm], console: Console) -> None:
    names = list(dict.fromkeys(name for arm in arms for name in arm.figures))
    table = Table(title="medians")
    for column in ("", *(arm.name for arm in arms)):
        table.add_column(column, justify="right")
    for name in names:
        values = [arm.figures.get(name) for arm in arms]
        table.add_row(name, *("" if not value else f"{statistics.median(value):,.0f}" for value in values))
    console.print(table)


def main() -> int:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            arms = start(options, stack, Path(folder))
            measure(arms, options)
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(arms, Console(width=120))
    report = {
        "benchmark": "peers",
        "blas": BLAS.library,
        "repeats": options.repeats,
        "medians": {
            arm.name: {name: round(statistics.median(values), 2) for name, values in arm.figures.items()}
            for arm in arms
        },
        "ratios": ratios(arms),
        "failures": {arm.name: arm.failure for arm in arms if arm.failure},
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
