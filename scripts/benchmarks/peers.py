"""This server beside others on one checkpoint: the same prompts through the same client, interleaved, in one run.

    cold     time to first token of prompts that nobody has seen
    streams  tokens per second of 1, 4, 8 and 32 answers at once, and processor time per token

Arms: ours in full, ours sparse, `mlx_lm.server`, and `vllm-mlx` with its own sparse prefill and without, if
`--vllm-mlx` names its executable (it needs an environment of its own). All get the same float32 copy of the checkpoint
and the same BLAS. Ratios are medians over the repetitions with 95 % intervals, which take six; above 1 ours is faster.

Two more figures come from the same models in this process, without a server: `mlx_lm.generate.generate_step`, from
which a server's own cost per token is told, and the limit of a sparse prefill (the draft over the prompt and the target
over as many tokens as were kept), of which ours sparse reaches a share.

    share_1k, share_2k           of the limit, in the time to first token over HTTP; the aims are .90 and .95
    vs_mlx_lm_8, vs_mlx_lm_32    tokens per second of so many streams in full over those of `mlx_lm.server`; 1.1
    cpu_per_token_ms             processor time of ours per token of eight streams, forwards included
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from mlx_specprefill import BLAS, EngineConfig

from .harness import BenchError, UnequalWorkError, check_alike, servers
from .harness.figures import Clock, median_interval, rounded, show, timed
from .harness.servers import DENSE, SPARSE, Copies, Reply, Server, together
from .harness.stages import plain_prefill_ms
from .harness.text import Text, user

Interval = list[float | None]  # median and the ends of its 95 % interval
QUICK = {"lengths": [1024, 2048], "repeats": 3}
FIFTH = {**SPARSE, "specprefill_keep_pct": 0.2}
OURS, OURS_SPARSE = "ours, full", "ours, sparse"
STREAMS = (1, 4, 8, 32)
ALIKE = 0.02  # of a prompt: no two are the same text
GAP_S = 0.005  # between connections: the listening queue of `mlx_lm.server` holds five
PARTS = ("cold", "streams")


@dataclass
class Figures:
    """The measurements of one contender, per repetition, and the reasons why a part is missing."""

    name: str
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, figure: str, value: float) -> None:
        self.values.setdefault(figure, []).append(value)


@dataclass
class Arm:
    """A server and the options of its requests."""

    figures: Figures
    server: Server
    options: dict[str, Any]

    def ask(self, text: str, tokens: int, wait_s: float = 0.0) -> Reply:
        time.sleep(wait_s)
        return self.server.ask(user(text), tokens, **self.options)


@dataclass
class BareLoop:
    """The same models without a server: mlx-lm's own generate loop, and the prefills that bound a sparse one.

    Target and draft are in this process. Nothing of the library touches them before their prefill.
    """

    target: Any
    draft: Any
    tokenizer: Any

    @classmethod
    def of(cls, target: Path, draft: Path) -> BareLoop:
        model, tokenizer = load(str(target))[:2]
        return cls(model, load(str(draft))[0], tokenizer)

    def tokens(self, text: str) -> list[int]:
        """Return the prompt as a server renders it."""
        return list(self.tokenizer.apply_chat_template(user(text), add_generation_prompt=True))

    def generate(self, text: str, count: int) -> float:
        """Return the time to first token of `mlx_lm.generate.generate_step` in ms, and generate `count` tokens."""
        steps = generate_step(mx.array(self.tokens(text)), self.target, max_tokens=count)
        ms, _ = timed(lambda: next(steps))
        for _ in steps:
            pass
        return ms

    def cpu_ms_per_token(self, text: str, count: int) -> float:
        """Return its processor time per token, including a short prompt."""
        clock = Clock()
        self.generate(text, count)
        return clock.read()["cpu_ms"] / count

    def limit_ms(self, text: str, kept: int) -> float:
        """Return the least time of a sparse prefill: the draft over all tokens, the target over `kept` tokens."""
        prompt, step = self.tokens(text), EngineConfig().prefill_step
        return plain_prefill_ms(self.draft, prompt, step) + plain_prefill_ms(self.target, prompt[-kept:], step)


@dataclass
class Bench:
    """All arms of a run."""

    arms: list[Arm]
    bare: BareLoop
    loop: Figures
    text: Text

    def attempt(self, part: str, work: Callable[[Arm], object]) -> None:
        """Run a part on every arm in turn. An arm that fails leaves the part, and the reason is kept.

        Raises:
            UnequalWorkError: an arm has done other work than the others.
        """
        for arm in self.arms:
            if part in arm.figures.failures:
                continue
            try:
                work(arm)
            except UnequalWorkError:
                raise
            except BenchError as error:
                arm.figures.failures[part] = str(error)[:300]
                print(f"note: {arm.figures.name} drops out of {part}: {str(error)[:300]}", file=sys.stderr)

    # --- parts -------------------------------------------------------------------------------------------------------

    def cold(self, length: int) -> None:
        kept, read = [], {}

        def one(arm: Arm) -> None:
            reply = arm.ask(self.text.of(length), 2)
            read[arm.figures.name] = reply.prompt_tokens - reply.cached_tokens
            arm.figures.add(f"cold {length} ms", 1e3 * reply.first_s)
            if arm.figures.name == OURS_SPARSE:
                kept.append(int(reply.report["kept_tokens"]))

        self.attempt("cold", one)
        check_alike("prompt tokens", read, ALIKE)
        self.loop.add(f"cold {length} ms", self.bare.generate(self.text.of(length), 2))
        if kept:
            self.loop.add(f"limit {length} ms", self.bare.limit_ms(self.text.of(length), kept[0]))

    def streams(self, count: int, tokens: int) -> None:
        cpu, waits = f"{count} streams CPU ms", [number * GAP_S for number in range(count)]

        def one(arm: Arm) -> None:
            prompts = [self.text.of(40) for _ in range(count)]
            begun, used = time.perf_counter(), arm.server.cpu_s()
            replies = together(lambda prompt, wait_s: arm.ask(prompt, tokens, wait_s), prompts, waits)
            total = sum(reply.completion_tokens for reply in replies)
            arm.figures.add(f"{count} streams tok/s", total / (time.perf_counter() - begun))
            arm.figures.add(cpu, 1e3 * (arm.server.cpu_s() - used) / total)

        self.attempt(f"{count} streams", one)
        if count == 1:
            self.loop.add(cpu, self.bare.cpu_ms_per_token(self.text.of(40), tokens))

    # --- all of them -------------------------------------------------------------------------------------------------

    def run(self, options: argparse.Namespace) -> None:
        """Repeat all parts in turn, so that disturbances of the machine reach all of them."""
        self.text.calibrate(self.arms[0].server)
        self.attempt("warm-up", lambda arm: arm.ask(self.text.of(600), 4))  # compiles and loads
        self.bare.generate(self.text.of(600), 4)
        for repeat in range(options.repeats):
            for length in options.lengths if "cold" in options.parts else ():
                self.cold(length)
            for count in STREAMS if "streams" in options.parts else ():
                self.streams(count, options.tokens)
            print(f"repetition {repeat + 1} of {options.repeats} done", file=sys.stderr, flush=True)


# --- what follows from the figures -----------------------------------------------------------------------------------


def compare(
    mine: Figures, other: Figures, how: Callable[[str, float, float], float], figures: str = ""
) -> dict[str, Interval]:
    """Return the median and interval of `how` over the common repetitions, for figures with this prefix."""
    return {
        name: _interval([how(name, a, b) for a, b in zip(values, other.values[name], strict=True)])
        for name, values in mine.values.items()
        if name.startswith(figures) and len(other.values.get(name, ())) == len(values)
    }


def _interval(values: list[float]) -> Interval:
    interval: Interval = rounded([statistics.median(values), *median_interval(values)], 3)
    return interval


def faster(name: str, mine: float, other: float) -> float:
    return mine / other if "tok/s" in name else other / mine


def report(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    full, sparse, *others = (arm.figures for arm in bench.arms)
    ratios = {f"{full.name} / {bench.loop.name}": compare(full, bench.loop, faster)}
    for other in others:
        ratios |= {f"{mine.name} / {other.name}": compare(mine, other, faster) for mine in (full, sparse)}
    ratios[f"{sparse.name} / {full.name}"] = compare(sparse, full, faster)
    limits = {name.replace("limit", "cold"): ms for name, ms in bench.loop.values.items() if name.startswith("limit")}
    shares = compare(Figures("limit", limits), sparse, lambda _, limit, ms: limit / ms)
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
        "sparse_share_of_limit": shares,
        "failures": {f.name: f.failures for f in everybody if f.failures},
        **{f"share_{int(name.split()[1]) // 1024}k": share for name, (share, *_) in shares.items()},
        **{
            f"vs_mlx_lm_{name.split()[0]}": times
            for name, (times, *_) in ratios[f"{full.name} / mlx_lm.server"].items()
            if "tok/s" in name
        },
        "cpu_per_token_ms": statistics.median(full.values.get("8 streams CPU ms", [math.nan])),
    }


def show_medians(bench: Bench) -> None:
    everybody = [*(arm.figures for arm in bench.arms), bench.loop]
    rows = []
    for name in dict.fromkeys(name for figures in everybody for name in figures.values):
        values = [figures.values.get(name) for figures in everybody]
        rows.append((name, *(statistics.median(value) if value else None for value in values)))
    show(("medians", *(figures.name for figures in everybody)), rows)


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--vllm-mlx", type=Path, help="the executable of vllm-mlx, in an environment of its own")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer of the streams")
    parser.add_argument("--repeats", type=int, default=6)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with servers.copies(options) as copies, ExitStack() as stack:
        bench = start(options, stack, copies)
        bench.run(options)
        errors = {arm.server.name: arm.server.errors() for arm in bench.arms}
    show_medians(bench)
    return report(bench, options) | {"logged_errors": errors}


def start(options: argparse.Namespace, stack: ExitStack, copies: Copies) -> Bench:
    """Start one process per server. The arms of one server share it."""
    ours = stack.enter_context(copies.ours("--densify", "off"))
    arms = [
        Arm(Figures(OURS), ours, DENSE),
        Arm(Figures(OURS_SPARSE), ours, FIFTH),
        Arm(Figures("mlx_lm.server"), stack.enter_context(copies.mlx_lm()), {}),
    ]
    if options.vllm_mlx:
        sparse = ["--specprefill", "--specprefill-draft-model", str(copies.draft), "--specprefill-threshold", "512"]
        batching = ["--continuous-batching"]  # which turns its sparse prefill off
        for name, extra, asked in (("vllm-mlx, sparse", sparse, FIFTH), ("vllm-mlx, full", batching, DENSE)):
            server = stack.enter_context(copies.vllm_mlx(options.vllm_mlx, name, *extra))
            arms.append(Arm(Figures(name), server, asked))
    return Bench(arms, BareLoop.of(copies.target, copies.draft), Figures("generate loop"), Text(0))
