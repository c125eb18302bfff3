#!/usr/bin/env python3
"""This server beside others on one checkpoint: the same prompts through the same client, interleaved, in one run.

    cold     time to first token of prompts that nobody has seen
    warm     the same for a second question behind a shared prefix of that length
    decode   time per token of one streamed answer after its first token
    streams  tokens per second of 1, 4 and 8 answers at once, and processor time per token
    load     requests that arrive at random moments at a given rate: mean time to first token, a timeout counting as
             that much time (SpecPrefill, figure 1)

Arms: ours in full, ours sparse, `mlx_lm.server`, and `vllm-mlx` with its own sparse prefill and without, if
`--vllm-mlx` names its executable (it needs an environment of its own). All get the same float32 copy of the checkpoint
and the same BLAS. Ratios are medians over the repetitions with 95 % bootstrap intervals; above 1 ours is faster.

Two more figures come from the same models in this process, without a server: `mlx_lm.generate.generate_step`, from
which a server's own cost per token is told, and the limit of a sparse prefill (the draft over the prompt and the target
over as many tokens as were kept), of which ours sparse reaches a share. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from bare_loop import BareLoop
from rich.console import Console
from rich.table import Table
from servers import DENSE, ROOT, BenchError, Reply, Server, Text, copy_checkpoint, module, preload, running, user

from mlx_specprefill import BLAS

SPARSE = {"specprefill": True, "specprefill_keep_pct": 0.2}
OURS, OURS_SPARSE = "ours, full", "ours, sparse"
STREAMS = (1, 4, 8)
TIMEOUT_S = 15.0
PARTS = ("cold", "warm", "decode", "streams", "load")
Interval = tuple[float, float, float]  # median and the ends of its 95 % bootstrap interval


@dataclass
class Figures:
    """What was measured of one contender, per repetition, and why a part is missing."""

    name: str
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, figure: str, value: float) -> None:
        self.values.setdefault(figure, []).append(value)


@dataclass
class Arm:
    """A server and how it is asked."""

    figures: Figures
    server: Server
    options: dict[str, Any]

    def ask(self, text: str, tokens: int) -> Reply:
        return self.server.ask(user(text), tokens, **self.options)


@dataclass
class Bench:
    """Everything that takes part."""

    arms: list[Arm]
    bare: BareLoop
    loop: Figures
    text: Text

    def attempt(self, part: str, work: Callable[[Arm], None]) -> None:
        """On every arm in turn; one that fails is out of the rest of that part, with the reason."""
        for arm in self.arms:
            if part in arm.figures.failures:
                continue
            try:
                work(arm)
            except (BenchError, httpx.HTTPError) as error:
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                arm.figures.failures[part] = reason
                print(f"note: {arm.figures.name} drops out of {part}: {reason}", file=sys.stderr)

    # --- parts -------------------------------------------------------------------------------------------------------

    def cold(self, length: int) -> None:
        kept = []

        def one(arm: Arm) -> None:
            reply = arm.ask(self.text.of(length), 2)
            arm.figures.add(f"cold {length} ms", 1e3 * reply.first_s)
            if arm.figures.name == OURS_SPARSE:
                kept.append(int(reply.report["kept_tokens"]))

        self.attempt("cold", one)
        self.loop.add(f"cold {length} ms", 1e3 * self.bare.generate(self.text.of(length), 2)[0])
        if kept:
            self.loop.add(f"limit {length} ms", 1e3 * self.bare.limit(self.text.of(length), kept[0]))

    def warm(self, length: int) -> None:
        def one(arm: Arm) -> None:
            shared = self.text.of(length)
            arm.ask(f"{shared} {self.text.of(20)}", 2)
            arm.figures.add(f"warm {length} ms", 1e3 * arm.ask(f"{shared} {self.text.of(20)}", 2).first_s)

        self.attempt("warm", one)

    def decode(self, length: int, tokens: int) -> None:
        figure = f"decode after {length} ms"
        bare_ms = 1e3 * self.bare.generate(self.text.of(length), tokens)[1]

        def one(arm: Arm) -> None:
            reply = arm.ask(self.text.of(length), tokens)
            ms = 1e3 * (reply.total_s - reply.first_s) / (reply.completion_tokens - 1)
            if 2 * ms < bare_ms:  # nobody is that much faster than the loop: its first token was held back
                raise BenchError(f"the answer came at its end: {reply.first_s:.2f} s, then {ms:.2f} ms per token")
            arm.figures.add(figure, ms)

        self.attempt("decode", one)
        self.loop.add(figure, bare_ms)

    def streams(self, count: int, tokens: int) -> None:
        cpu = f"{count} streams CPU ms"

        def one(arm: Arm) -> None:
            prompts = [self.text.of(40) for _ in range(count)]
            begun, used = time.perf_counter(), arm.server.cpu_s()
            with ThreadPoolExecutor(count) as pool:
                replies = list(pool.map(lambda prompt: arm.ask(prompt, tokens), prompts))
            total = sum(reply.completion_tokens for reply in replies)
            arm.figures.add(f"{count} streams tok/s", total / (time.perf_counter() - begun))
            arm.figures.add(cpu, 1e3 * (arm.server.cpu_s() - used) / total)

        self.attempt(f"{count} streams", one)
        if count == 1:
            self.loop.add(cpu, 1e3 * self.bare.cpu_per_token(self.text.of(40), tokens))

    def load(self, length: int, rate: float, count: int) -> None:
        """`count` requests, Poisson at `rate` per second, the same moments for every arm."""
        rng, at, moments = random.Random(1), 0.0, []
        for _ in range(count):
            at += rng.expovariate(rate)
            moments.append(at)

        def one(arm: Arm) -> None:
            prompts, begun = [self.text.of(length) for _ in moments], time.perf_counter()

            def request(moment: float, prompt: str) -> float:
                time.sleep(max(0.0, begun + moment - time.perf_counter()))
                try:
                    return min(arm.ask(prompt, 2).first_s, TIMEOUT_S)
                except (BenchError, httpx.HTTPError):
                    return TIMEOUT_S

            with ThreadPoolExecutor(count) as pool:
                times = list(pool.map(request, moments, prompts))
            arm.figures.add(f"load {rate:g}/s ms", 1e3 * statistics.mean(times))
            arm.figures.add(f"load {rate:g}/s timeouts", sum(seconds == TIMEOUT_S for seconds in times))

        self.attempt("load", one)

    # --- all of them -------------------------------------------------------------------------------------------------

    def run(self, options: argparse.Namespace) -> None:
        """Again and again in turn: what disturbs the machine disturbs all of them."""
        self.text.calibrate(self.arms[0].server)
        self.attempt("warm-up", self._first_requests)
        self.bare.generate(self.text.of(600), 4)
        for repeat in range(options.repeats):
            for measure in self._parts(options):
                measure()
            print(f"repetition {repeat + 1} of {options.repeats} done", file=sys.stderr, flush=True)
        if "load" in options.parts:
            for rate in options.rates:
                self.load(options.load_length, rate, options.load_requests)

    def _first_requests(self, arm: Arm) -> None:
        arm.ask(self.text.of(600), 4)  # compiles and loads

    def _parts(self, options: argparse.Namespace) -> Iterator[Callable[[], None]]:
        for length in options.lengths:
            if "cold" in options.parts:
                yield lambda length=length: self.cold(length)
            if "warm" in options.parts:
                yield lambda length=length: self.warm(length)
            if "decode" in options.parts:
                yield lambda length=length: self.decode(length, options.tokens)
        if "streams" in options.parts:
            for count in STREAMS:
                yield lambda count=count: self.streams(count, options.tokens)


# --- what follows from the figures -----------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> Interval:
    array = np.array(values)
    draws = np.random.default_rng(0).choice(array, (2000, array.size))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return round(float(np.median(array)), 3), round(float(low), 3), round(float(high), 3)


def compare(
    mine: Figures, other: Figures, how: Callable[[str, float, float], float], figures: str = ""
) -> dict[str, Interval]:
    """`how` of every repetition that both have, for the figures whose name begins so."""
    return {
        name: interval([how(name, a, b) for a, b in zip(values, other.values[name], strict=True)])
        for name, values in mine.values.items()
        if name.startswith(figures) and "timeouts" not in name and len(other.values.get(name, ())) == len(values)
    }


def faster(name: str, mine: float, other: float) -> float:
    return mine / other if "tok/s" in name else other / mine


def report(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    full, sparse, *others = (arm.figures for arm in bench.arms)
    ratios = {f"{full.name} / {bench.loop.name}": compare(full, bench.loop, faster)}
    for other in others:
        ratios |= {f"{mine.name} / {other.name}": compare(mine, other, faster) for mine in (full, sparse)}
    ratios[f"{sparse.name} / {full.name}"] = compare(sparse, full, faster)
    limits = {name.replace("limit", "cold"): ms for name, ms in bench.loop.values.items() if name.startswith("limit")}
    everybody = [*(arm.figures for arm in bench.arms), bench.loop]
    return {
        "benchmark": "peers",
        "blas": BLAS.library,
        "repeats": options.repeats,
        "medians": {f.name: {name: round(statistics.median(v), 2) for name, v in f.values.items()} for f in everybody},
        "ratios": ratios,
        "overhead_cpu_ms_per_token": {
            f.name: compare(f, bench.loop, lambda _, server, loop: server - loop, "1 streams CPU")
            for f in everybody[:-1]
        },
        "sparse_share_of_limit": compare(Figures("limit", limits), sparse, lambda _, limit, ms: limit / ms),
        "failures": {f.name: f.failures for f in everybody if f.failures},
    }


def show(bench: Bench, console: Console) -> None:
    everybody = [*(arm.figures for arm in bench.arms), bench.loop]
    table = Table(title="medians")
    for column in ("", *(figures.name for figures in everybody)):
        table.add_column(column, justify="right")
    for name in dict.fromkeys(name for figures in everybody for name in figures.values):
        values = [figures.values.get(name) for figures in everybody]
        table.add_row(name, *("" if not value else f"{statistics.median(value):,.4g}" for value in values))
    console.print(table)


# --- start -----------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "models/demo/target")
    parser.add_argument("--draft", type=Path, default=ROOT / "models/demo/draft")
    parser.add_argument("--vllm-mlx", type=Path, help="the executable of vllm-mlx, in an environment of its own")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer when decoding is compared")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1.0, 2.0], help="requests per second")
    parser.add_argument("--load-length", type=int, default=2048)
    parser.add_argument("--load-requests", type=int, default=12)
    parser.add_argument("--start-s", type=float, default=90.0)
    parser.add_argument("--quick", action="store_true", help="1K and 2K, three times, one rate")
    options = parser.parse_args()
    if options.quick:
        options.lengths, options.repeats, options.rates, options.load_requests = [1024, 2048], 3, [1.0], 8
    return options


def start(options: argparse.Namespace, stack: ExitStack, folder: Path) -> Bench:
    """One process per server; the arms of one server share it."""
    target = copy_checkpoint(options.target, folder / "target")
    draft = copy_checkpoint(options.draft, folder / "draft")
    costs = folder / "costs.json"

    def serve(name: str, command: list[str], **more: str) -> Server:
        log = folder / f"{name.replace(', ', '-')}.log"
        return stack.enter_context(running(name, command, log, options.start_s, **more))

    command = module("mlx_specprefill_server", "serve", "--target", str(target), "--draft", str(draft))
    ours = serve("ours", [*command, "--dtype", "float32", "--no-densify"], MLX_SPECPREFILL_CALIBRATION_FILE=str(costs))
    lm = serve("mlx_lm.server", module("mlx_lm.server", "--model", str(target)), **preload())
    arms = [
        Arm(Figures(OURS), ours, DENSE),
        Arm(Figures(OURS_SPARSE), ours, SPARSE),
        Arm(Figures("mlx_lm.server"), lm, {}),
    ]
    if options.vllm_mlx:
        command = [str(options.vllm_mlx), "serve", str(target)]
        sparse = ["--specprefill", "--specprefill-draft-model", str(draft), "--specprefill-threshold", "512"]
        batching = ["--continuous-batching"]  # which turns its sparse prefill off
        for name, extra, asked in (("vllm-mlx, sparse", sparse, SPARSE), ("vllm-mlx, full", batching, DENSE)):
            server = serve(name, command + extra, model=str(target), **preload())
            arms.append(Arm(Figures(name), server, asked))
    return Bench(arms, BareLoop.of(target, draft, costs), Figures("generate loop"), Text(0))


def main() -> int:
    options = arguments()
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            bench = start(options, stack, Path(folder))
            bench.run(options)
            errors = {arm.server.name: arm.server.errors() for arm in bench.arms}
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(bench, Console(width=140))
    print(json.dumps(report(bench, options) | {"logged_errors": errors}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
