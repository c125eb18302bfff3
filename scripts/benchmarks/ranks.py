"""What the ranks of one target send each other per token, and the share of their time that it takes.

Runs on several machines (`--hosts`, MLX's hostfile), or inside of `mlx.launch`. Each prompt is prefilled in full, and
an answer decoded behind it, in two arms that take turns: as it is, and with every collective replaced by an array of
the same shape that is there already. The second computes the same amount and something else; the difference is what
the ranks spend on sending and waiting:

    share        = 1 - (time without collectives) / (time with them)
    payload      = bytes of the arrays that are summed, gathered or sent, per token
    wire         = bytes that a rank sends for it in a ring, per token: 2 (N - 1) / N times what is summed, N - 1 times
                   what is gathered, and once what is sent on
    collectives  = of one forward, however many tokens it has: each takes the connection's latency at least

The last part of a forward that nobody waits for is counted and not run: one of some dozens, in slices of a prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import Ranks, join_ranks
from mlx_specprefill.adapters.sharding import Sharding, shard
from mlx_specprefill.distributed.ranks import Group
from mlx_specprefill.shapes import SHAPES

from .harness import BenchError
from .harness.figures import machine, rounded, show_rows, timed
from .harness.random_pair import random_pair
from .harness.stages import full_prefill

QUICK = {"lengths": [512], "repeats": 2}
DECODED = 16  # tokens
STEP = 512  # tokens per forward
Arm = dict[str, float]


class Wire:
    """Counts what collectives carry, or stands in for them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._real = {name: getattr(mx.distributed, name) for name in ("all_sum", "all_gather", "send", "recv_like")}
        self.payload = self.wire = self.count = 0

    @contextmanager
    def counting(self) -> Iterator[Wire]:
        self.payload = self.wire = self.count = 0
        with self._replaced({name: self._counted(name) for name in self._real}):
            yield self

    @contextmanager
    def nothing_sent(self) -> Iterator[None]:
        whole = {"all_gather": lambda array, **_: mx.concatenate([array] * self._size)}
        own = {name: lambda array, *_, **__: array for name in ("all_sum", "send", "recv_like")}
        with self._replaced({**own, **whole}):
            yield

    def _counted(self, name: str) -> Callable[..., mx.array]:
        sends = {"all_sum": 2 * (self._size - 1) / self._size, "all_gather": self._size - 1.0, "send": 1.0}

        def call(array: mx.array, *args: Any, **more: Any) -> mx.array:
            if name in sends:
                self.count += 1
                self.payload += array.nbytes
                self.wire += round(sends[name] * array.nbytes)
            found: mx.array = self._real[name](array, *args, **more)
            return found

        return call

    @contextmanager
    def _replaced(self, functions: dict[str, Callable[..., mx.array]]) -> Iterator[None]:
        for name, function in functions.items():
            setattr(mx.distributed, name, function)
        try:
            yield
        finally:
            for name, function in self._real.items():
                setattr(mx.distributed, name, function)


def arm(model: nn.Module, prompt: list[int]) -> Arm:
    """Milliseconds of a prefill, and of a token behind it."""
    cache = list(make_prompt_cache(model))
    prefill_ms, logits = timed(lambda: full_prefill(model, cache, prompt, STEP))

    def decode() -> None:
        token = mx.argmax(logits, axis=-1)
        for _ in range(DECODED):
            token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
            mx.eval(token)

    return {"prefill_ms": prefill_ms, "token_ms": timed(decode)[0] / DECODED}


def carried(model: nn.Module, wire: Wire, tokens: int) -> dict[str, float]:
    """Of one forward: what is sent per token."""
    with wire.counting():
        mx.eval(model(mx.zeros((1, tokens), dtype=mx.int32), cache=list(make_prompt_cache(model))))
    return {"collectives": wire.count, "payload": wire.payload / tokens, "wire": wire.wire / tokens}


def measured(model: nn.Module, ranks: Ranks, prompt: list[int], repeats: int) -> dict[str, float]:
    """Medians of both arms for one prompt, and what is sent for it."""
    wire, arms = Wire(ranks.size), {"with": list[Arm](), "without": list[Arm]()}
    for index in range(repeats + 1):
        ranks.range(0)  # nobody begins before the others are there
        runs = [("with", arm(model, prompt))]
        with wire.nothing_sent():
            runs.append(("without", arm(model, prompt)))
        if index:  # whatever compiles does so in the first
            for name, run in runs:
                arms[name].append(run)
    medians = {
        f"{what}_{name}": statistics.median(run[what] for run in found)
        for name, found in arms.items()
        for what in ("prefill_ms", "token_ms")
    }
    shares = {
        f"{what}_share": 1 - medians[f"{what}_ms_without"] / medians[f"{what}_ms_with"] for what in ("prefill", "token")
    }
    return {"tokens": len(prompt)} | medians | shares | carried(model, wire, min(STEP, len(prompt)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=Path, help="MLX's hostfile: starts this benchmark on its machines")
    parser.add_argument("--starting-port", type=int, help="the first port between them, as of mlx.launch")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b", help="random weights in this shape")
    parser.add_argument("--layers", type=int, help="of the target")
    parser.add_argument("--experts", type=int, help="per expert layer; the work per token stays")
    parser.add_argument("--narrow", type=int, default=1, help="divide widths, for machines without a GPU")
    parser.add_argument("--quantised", action="store_true", help="at the shape's usual bits per weight")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096], help="prompt tokens")
    parser.add_argument("--repeats", type=int, default=3, help="turns that both arms take")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.hosts is not None:
        return launched(options)
    ranks = join_ranks()
    if not isinstance(ranks, Group):
        raise BenchError("this is no rank of several: give --hosts, or run it with mlx.launch")
    pair = random_pair(options.shape, options.layers, options.experts, options.narrow, options.dtype, options.quantised)
    kind: Sharding = shard(pair.target, pair.target_id, pair.target_config, ranks)
    mx.eval(pair.target.parameters())
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(0, pair.vocab_size, length)] for length in options.lengths]
    rows = [measured(pair.target, ranks, prompt, options.repeats) for prompt in prompts]
    ranks.close()
    if not ranks.leads:
        return {}
    show_rows(rows)
    report = {"benchmark": "ranks", **machine(), "target": pair.target_id, "dtype": pair.dtype, "rows": rows}
    return rounded(report | {"ranks": ranks.size, "sharding": kind})  # type: ignore[no-any-return]


def launched(options: argparse.Namespace) -> dict[str, Any]:
    """This benchmark on all hosts; rank 0's report."""
    port = () if options.starting_port is None else ("--starting-port", str(options.starting_port))
    command = [str(Path(sys.executable).with_name("mlx.launch")), "--hostfile", str(options.hosts), *port, "--"]
    command += [sys.executable, "-P", "-m", "benchmarks", "ranks", "--dtype", options.dtype, "--shape", options.shape]
    command += [
        part
        for name in ("layers", "experts")
        if (value := getattr(options, name))
        for part in (f"--{name}", str(value))
    ]
    command += ["--narrow", str(options.narrow), "--repeats", str(options.repeats)]
    command += ["--quantised"] if options.quantised else []
    command += ["--lengths", *map(str, options.lengths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    found = [line for line in said.splitlines() if line.startswith('{"benchmark"')]
    print("\n".join(line for line in said.splitlines() if not line.startswith("{")))
    if not found:
        raise BenchError("the ranks have measured nothing; they say why above")
    report: dict[str, Any] = json.loads(found[0])
    return report
