"""The highest rate of requests that a server keeps up with: sparse, in full, and `mlx_lm.server`.

Requests arrive at random moments (Poisson), the same ones for every arm: prompts of `--lengths` tokens, log-uniform
between the two, answers of 8 to 64 tokens. Three in ten begin with one of four shared texts of `--shared` tokens, three
in ten go on with an earlier conversation, as soon as that has its answer.

A rate is sustained if, over `--seconds` and at least `--least` requests, the 95th percentile of the time to first token
is at most `--limit-s`. It is doubled until it isn't, then halved into the gap `--halvings` times (SpecPrefill, figure
1). A request that follows another waits from the moment that the other's answer is there. What hasn't been sent when a
tenth of the requests are too late counts as too late.

Arms: ours with every request sparse, ours with every request in full, `mlx_lm.server`. All get the same float32 copy
of the checkpoint, whose answers have exactly the asked length, and the same BLAS. scripts/plot_bench.py draws what
comes out.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .harness import BenchError, servers
from .harness.figures import machine, rounded, show_rows
from .harness.servers import DENSE, SPARSE, Copies, Server
from .harness.text import Text, following, user

QUICK = {"seconds": 30.0, "halvings": 1, "alone": True}
PREFIXES = 4
SHARED, CONTINUED = 0.3, 0.3  # shares of the requests
ANSWERS = (8, 64)  # tokens
LATE_SHARE = 0.1  # of the requests: more than the twentieth that a sustained rate may have
MOST_AT_ONCE = 128
DECIDED = ("--specprefill-threshold", "512")  # each request says how it is read: nothing has to be measured
OURS_SPARSE, OURS_FULL, PEER = "ours, sparse", "ours, full", "mlx_lm.server"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Arm:
    """A server and how it is asked."""

    name: str
    server: Server
    options: dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One of a plan. `at` is in seconds; `follows` the number of the request whose conversation it goes on with."""

    at: float
    tokens: int
    answer: int
    prefix: int | None = None
    follows: int | None = None


def planned(rate: float, seconds: float, lengths: Sequence[int], seed: int) -> list[Request]:
    """All requests of one rate; the same for the same arguments."""
    rng, at, plan = random.Random(f"load/{seed}/{rate}"), 0.0, list[Request]()
    low, high = lengths
    while (at := at + rng.expovariate(rate)) < seconds:
        tokens, answer = round(low * (high / low) ** rng.random()), rng.randint(*ANSWERS)
        kind, followed = rng.random(), {one.follows for one in plan}
        open_ends = [number for number in range(len(plan)) if number not in followed]
        prefix = rng.randrange(PREFIXES) if kind < SHARED else None
        follows = rng.choice(open_ends) if SHARED <= kind < SHARED + CONTINUED and open_ends else None
        plan.append(Request(at, tokens, answer, prefix, follows))
    return plan


# --- one rate --------------------------------------------------------------------------------------------------------


@dataclass
class Trial:
    """One arm under one rate.

    Attributes:
        waits: seconds to the first token, by request; infinite for what was never sent or has failed.
    """

    arm: Arm
    plan: list[Request]
    text: Text
    prefixes: list[str]
    limit_s: float
    begun: float = field(default_factory=time.perf_counter)
    waits: list[float] = field(default_factory=list)
    late: int = 0
    hopeless: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        ends: list[Future[Messages | None]] = []
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            self.waits = [math.inf] * len(self.plan)
            for number, request in enumerate(self.plan):
                self.hopeless.wait(max(0.0, self.begun + request.at - time.perf_counter()))
                before = None if request.follows is None else ends[request.follows]
                ends.append(pool.submit(self._send, number, request, self._said(request), before))

    def _said(self, request: Request) -> str:
        """Its own text, behind the shared one."""
        own = self.text.of(request.tokens)
        return own if request.prefix is None else f"{self.prefixes[request.prefix]} {own}"

    def _send(
        self, number: int, request: Request, said: str, before: Future[Messages | None] | None
    ) -> Messages | None:
        """The conversation with its answer; None where there is none."""
        history = [] if before is None else before.result()
        if history is None or self.hopeless.is_set():
            return None
        messages: Messages = [*history, *user(said)]
        try:
            reply = self.arm.server.ask(messages, request.answer, **self.arm.options)
        except BenchError as error:
            print(f"note: a request failed: {error}", file=sys.stderr)
            self._judge(math.inf)
            return None
        self.waits[number] = reply.first_s
        self._judge(reply.first_s)
        return following(messages, reply, "")[:-1]

    def _judge(self, first_s: float) -> None:
        with self._lock:
            self.late += first_s > self.limit_s
            if self.late > LATE_SHARE * len(self.plan):
                self.hopeless.set()

    def row(self, rate: float) -> dict[str, Any]:
        """Seconds; a percentile is None where that request has no first token."""
        waits = sorted(self.waits)
        p95 = waits[min(len(waits) - 1, int(0.95 * len(waits)))]
        half = statistics.median_low(waits)
        return {
            "arm": self.arm.name,
            "rate": rate,
            "requests": len(waits),
            "unanswered": sum(math.isinf(one) for one in waits),
            "p50_s": half if math.isfinite(half) else None,
            "p95_s": p95 if math.isfinite(p95) else None,
            "sustained": p95 <= self.limit_s,
        }


# --- all rates -------------------------------------------------------------------------------------------------------


def highest(first: float, halvings: int, sustained: Callable[[float], bool]) -> float | None:
    """The highest rate that is, within a factor of 2 ** (1 / 2 ** halvings); None if not even an eighth of `first`."""
    good, bad = None, None
    rate = first
    while good is None or bad is None:
        if sustained(rate):
            good, rate = rate, 2 * rate
        else:
            bad, rate = rate, rate / 2
        if bad is not None and good is None and rate < first / 8:
            return None
    for _ in range(halvings):
        rate = math.sqrt(good * bad)
        if sustained(rate):
            good = rate
        else:
            bad = rate
    return good


def sweep(arm: Arm, text: Text, options: argparse.Namespace) -> tuple[float | None, list[dict[str, Any]]]:
    """The highest sustained rate, and a row per rate that was tried."""
    rows: list[dict[str, Any]] = []
    common = text.fresh("shared")
    prefixes = [common.of(options.shared) for _ in range(PREFIXES)]

    def sustained(rate: float) -> bool:
        seconds = options.seconds
        while len(plan := planned(rate, seconds, options.lengths, options.seed)) < options.least:
            seconds *= 1.5
        trial = Trial(arm, plan, text.fresh(rate), prefixes, options.limit_s)
        trial.run()
        arm.server.rest()
        rows.append(row := trial.row(rate))
        print(f"{arm.name}, {rate:.3g}/s: p95 {row['p95_s'] or math.inf:.2f} s", file=sys.stderr, flush=True)
        return bool(row["sustained"])

    return highest(options.rate, options.halvings, sustained), rows


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--lengths", type=int, nargs=2, default=[300, 2000], help="tokens of the prompts")
    parser.add_argument("--shared", type=int, default=500, help="tokens of the texts that prompts share")
    parser.add_argument("--seconds", type=float, default=90.0, help="for which requests are sent at each rate")
    parser.add_argument("--limit-s", type=float, default=5.0, help="for the 95th percentile of the time to first token")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second to begin with")
    parser.add_argument("--halvings", type=int, default=2)
    parser.add_argument(
        "--least", type=int, default=8, help="requests that a rate is judged by, at low ones for longer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not 0 < options.lengths[0] <= options.lengths[1] or options.rate <= 0 or options.seconds <= 0:
        raise BenchError("--lengths must be two ascending numbers of tokens, --rate and --seconds positive")
    text, swept = Text(options.seed), {}
    with servers.copies(options) as copies:
        for name, start, asked in arms(copies, options):
            with start() as server:  # alone: idle time is for work on what a server has read
                arm = Arm(name, server, asked)
                server.ask(user("Hello"), 4, **asked)  # compiles and loads
                text.calibrate(server)
                swept[name] = sweep(arm, text, options)
    report = rounded(summary(swept, options))
    show_rows(report["rows"])
    return report


def arms(
    copies: Copies, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Server]], dict[str, Any]]]:
    """Name, how its server is started, and how requests are to be read."""
    yield OURS_SPARSE, partial(copies.ours, *DECIDED), SPARSE
    yield OURS_FULL, partial(copies.ours, *DECIDED), DENSE
    if not options.alone:
        yield PEER, copies.mlx_lm, {}


def summary(swept: dict[str, tuple[float | None, list[dict[str, Any]]]], options: argparse.Namespace) -> dict[str, Any]:
    rates = {name: rate for name, (rate, _) in swept.items()}
    return {
        "benchmark": "load",
        **machine(),
        "limit_s": options.limit_s,
        "rates": rates,
        "sparse_vs_dense": quotient(rates[OURS_SPARSE], rates[OURS_FULL]),
        "dense_vs_mlx_lm": quotient(rates[OURS_FULL], rates.get(PEER)),
        "rows": [row for _, rows in swept.values() for row in rows],
    }


def quotient(mine: float | None, other: float | None) -> float | None:
    return mine / other if mine and other else None
