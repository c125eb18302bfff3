"""Waiting times of short requests under load, over HTTP, beside `mlx_lm.server`.

    behind    time to first token of a short request sent into a long prefill, over the same on an idle server
    idle      the wait in the queue of tiny requests while the server reads a sparse prompt again, in full
    crowd     short requests under 64 clients with mixed lengths: p99 of the time to first token against idle

Real processes, real HTTP. Both servers get the same float32 copy of the checkpoint whose end-of-answer token is one
that the models don't write, so every answer has exactly the asked length, and the same BLAS.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from .harness import BenchError, servers
from .harness.figures import machine, rounded, show_rows, timed
from .harness.servers import DENSE, SPARSE, Server
from .harness.text import Text, user

QUICK = {"long": 6000, "repeats": 1, "crowd_s": 45.0, "crowd_limit_s": 45.0}
IDLE_LIMIT_S = 6  # after it, no idle work is left
SHORT = 600  # tokens of the request that arrives late: what coding agents ask for a title with
CLIENTS, SHORT_CLIENTS = 64, 8  # in the crowd, and those of them that send short requests
SHORT_LENGTHS = (11, SHORT)  # tokens, in turn
LONG_LENGTHS = (1000, 4000)  # tokens; of the other clients
TINY = 11  # tokens of a request during idle work
PARTS = ("behind", "idle", "crowd")

# --- measurements ----------------------------------------------------------------------------------------------------


def behind(server: Server, text: Text, long: int, repeats: int) -> dict[str, Any]:
    """Send a short request while a long prompt is being read."""
    idle = statistics.median(server.ask(user(text.of(SHORT)), 2, **DENSE).first_s for _ in range(2 * repeats + 1))
    alone, late = [], []
    for _ in range(repeats):
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(server.ask, user(text.of(long)), 2, **DENSE)
            time.sleep(0.5)
            if reading.done():
                raise BenchError(f"{server.name} reads {long} tokens in half a second: choose a longer --long")
            late.append(server.ask(user(text.of(SHORT)), 2, **DENSE).first_s)
            alone.append(reading.result().first_s)
    short = statistics.median(late)
    return {
        "long_tokens": long,
        "idle_ms": 1e3 * idle,
        "behind_ms": 1e3 * short,
        "long_ms": 1e3 * statistics.median(alone),
        "ratio": short / idle,
    }


def during_idle_work(server: Server, text: Text, long: int, repeats: int) -> dict[str, Any]:
    """Send tiny requests one after another while idle work runs behind a sparse answer."""
    waits: list[float] = []
    for _ in range(repeats):
        server.ask(user(text.of(long)), 2, **SPARSE)
        while works_idly(server):
            waits.append(server.ask(user(text.of(TINY)), 2, **DENSE).report["timings"]["queue_ms"])
    if not waits:
        raise BenchError(f"{server.name} began no idle work within {IDLE_LIMIT_S} s")
    waits.sort()
    return {
        "long_tokens": long,
        "requests": len(waits),
        "p50_ms": statistics.median(waits),
        "p99_ms": waits[min(len(waits) - 1, int(0.99 * len(waits)))],
        "worst_ms": waits[-1],
    }


def works_idly(server: Server) -> bool:
    """Wait until idle work runs. Return False if none begins."""
    end = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < end:
        if server.client.get(f"{server.base}/health").json()["background"]:
            time.sleep(random.uniform(0, 0.3))
            return True
        time.sleep(0.02)
    return False


@dataclass
class Short:
    """A short request of the crowd. Times are in seconds, `sent` by the monotonic clock. `first_s` is None until its
    first token.
    """

    length: int
    sent: float
    first_s: float | None = None


def crowd(server: Server, text: Text, seconds: float, limit_s: float) -> list[dict[str, Any]]:
    """Send short requests among clients with a long one always running. This part must be the last: the clients keep
    running.

    Args:
        seconds: for which short requests are sent.
        limit_s: after these, those without a first token are given up: they count with the time that they waited.
    """
    idle = {
        length: [server.ask(user(text.of(length)), 2, **DENSE).first_s for _ in range(11)] for length in SHORT_LENGTHS
    }
    over, asked = threading.Event(), []
    for _ in range(CLIENTS - SHORT_CLIENTS):
        threading.Thread(target=long_client, args=(server, text, over), daemon=True).start()
    time.sleep(5)
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=short_client, args=(server, text, until, asked), daemon=True)
        for _ in range(SHORT_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + limit_s - time.monotonic()))
    over.set()
    return [waiting(length, idle[length], [one for one in asked if one.length == length]) for length in SHORT_LENGTHS]


def long_client(server: Server, text: Text, over: threading.Event) -> None:
    """Send one request after another until the measurement is over or the server is gone."""
    rng = random.Random()
    while not over.is_set():
        length = round(LONG_LENGTHS[0] * (LONG_LENGTHS[1] / LONG_LENGTHS[0]) ** rng.random())
        try:
            server.ask(user(text.of(length)), rng.randint(16, 128), **DENSE)
        except BenchError as error:
            if not over.is_set():
                print(f"note: a long request failed: {error}", file=sys.stderr)


def short_client(server: Server, text: Text, until: float, asked: list[Short]) -> None:
    """Send requests with pauses. The first failure ends them and counts as unanswered."""
    rng = random.Random()
    try:
        while time.monotonic() < until:
            for length in SHORT_LENGTHS:
                time.sleep(rng.uniform(0.5, 2))
                asked.append(request := Short(length, time.monotonic()))
                request.first_s = server.ask(user(text.of(length)), 8, **DENSE).first_s
    except BenchError as error:
        if time.monotonic() < until:
            print(f"note: a short request failed: {error}", file=sys.stderr)


def waiting(length: int, idle: list[float], asked: list[Short]) -> dict[str, Any]:
    if not asked:  # every client still waits for another request
        return {"tokens": length, "requests": 0, "unanswered": 0, "p99_ratio": None}
    now = time.monotonic()
    seen = sorted(now - one.sent if one.first_s is None else one.first_s for one in asked)
    usual, worst = statistics.median(idle), seen[min(len(seen) - 1, int(0.99 * len(seen)))]
    return {
        "tokens": length,
        "requests": len(seen),
        "unanswered": sum(one.first_s is None for one in asked),
        "idle_ms": 1e3 * usual,
        "p50_ms": 1e3 * statistics.median(seen),
        "p99_ms": 1e3 * worst,
        "p99_ratio": worst / usual,
    }


# --- the whole -------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--long", type=int, default=12000, help="tokens of the prompt that others arrive behind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crowd-s", type=float, default=180.0, help="seconds for which short requests are sent")
    parser.add_argument("--crowd-limit-s", type=float, default=120.0, help="after these, for their first tokens")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with servers.copies(options) as copies:
        starts = {"mlx-specprefill": partial(copies.ours, "--specprefill-threshold", "512")}
        if not options.alone:
            starts["mlx_lm.server"] = copies.mlx_lm
        results = {}
        for name, start in starts.items():
            with start() as server:
                results[name] = measured(server, options)
    for name, parts in results.items():
        for part, figures in parts.items():
            show_rows(figures if isinstance(figures, list) else [figures], f"{name}: {part}")
    return rounded(summary(results))


def measured(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the wanted parts, the crowd last."""
    text, results = Text(0), {}
    text.calibrate(server)
    steps = {
        "behind": lambda: behind(server, text, options.long, options.repeats),
        "idle": lambda: during_idle_work(server, text, options.long, options.repeats),
        "crowd": lambda: crowd(server, text, options.crowd_s, options.crowd_limit_s),
    }
    for name in PARTS:
        if name in options.parts and (name != "idle" or server.name == "ours"):
            ms, results[name] = timed(steps[name])
            print(f"{name}, {server.name}: {ms / 1e3:.0f} s", file=sys.stderr, flush=True)
    return results


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ours = results["mlx-specprefill"]
    return {
        "benchmark": "serving",
        **machine(),
        **({"short_behind_long_ratio": ours["behind"]["ratio"]} if "behind" in ours else {}),
        **{
            f"{prefix}crowd_{row['tokens']}_p99_ratio": row["p99_ratio"]
            for prefix, server in (("", "mlx-specprefill"), ("peer_", "mlx_lm.server"))
            for row in results.get(server, {}).get("crowd", [])
        },
        "rows": results,
    }
