#!/usr/bin/env python3
"""The server under load, on the bundled pair: real processes, real HTTP, and `mlx_lm.server` beside it.

    streams   tokens per second of 8 streams at once over one alone
    behind    time to first token of a short request sent into a long prefill, over the same on an idle server
    turns     how much of an agent's second turn comes from the cache after a dozen unrelated requests
    densified the second turn after a sparse first one (made dense in idle time), over the same after a dense one
    prefix    cold full, cached prefix, sparse, and both, on one shared prefix and new text after it
    resume    a full prefill cancelled half way and sent again
    session   seven turns of an agent without a pause, sparse and dense
    crowd     short requests under 64 clients with mixed lengths: p99 of the time to first token against idle

Both servers get the same float32 copy of the checkpoint whose end-of-answer token is one that the models don't write,
so every answer has exactly the asked length, and the same BLAS. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from servers import (
    DENSE,
    ROOT,
    BenchError,
    Server,
    Text,
    agent,
    copy_checkpoint,
    following,
    module,
    preload,
    running,
    user,
)

from mlx_specprefill import BLAS

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)

STREAMS = 8
UNRELATED = 12
SHORT = 600  # tokens of the request that arrives late: what coding agents ask for a title with
SPARSE = {"specprefill": True}
CLIENTS, SHORT_CLIENTS = 64, 8  # in the crowd, and those of them that send short requests
SHORT_LENGTHS = (11, SHORT)  # tokens, in turn
LONG_LENGTHS = (1000, 4000)  # tokens; of the other clients
NAMES = "Anna Peter Maria Thomas Laura Daniel Sophie".split()

# --- measurements ----------------------------------------------------------------------------------------------------


def streams(server: Server, text: Text, tokens: int, repeats: int) -> dict[str, Any]:
    """Decode speed alone and side by side. Prompts are short, so this is about tokens, not about prefill."""
    alone, together = [], []
    for _ in range(repeats):
        alone.append(rate(server, text, tokens, 1))
        together.append(rate(server, text, tokens, STREAMS))
    one, many = statistics.median(alone), statistics.median(together)
    return {"alone_tok_s": one, "together_tok_s": many, "streams": STREAMS, "gain": many / one}


def rate(server: Server, text: Text, tokens: int, count: int) -> float:
    prompts = [user(text.of(40)) for _ in range(count)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(lambda prompt: server.ask(prompt, tokens, **DENSE), prompts))
    seconds = time.perf_counter() - begun
    if short := [reply.completion_tokens for reply in replies if reply.completion_tokens != tokens]:
        print(f"note: {server.name} ended answers early, at {short} of {tokens} tokens", file=sys.stderr)
    return sum(reply.completion_tokens for reply in replies) / seconds


def behind(server: Server, text: Text, long: int, repeats: int) -> dict[str, Any]:
    """A short request that arrives while a long prompt is being read."""
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


def turns(server: Server, text: Text, system_tokens: int) -> dict[str, Any]:
    """An agent, a dozen strangers, and the agent again."""
    messages = agent("You are an agent. Tools: " + text.of(system_tokens), text.of(30))
    first = server.ask(messages, 16, **DENSE)
    for _ in range(UNRELATED):
        server.ask(user(text.of(random.Random(7).randint(20, 60))), 4, **DENSE)
    second = server.ask(following(messages, first, "The tool says: " + text.of(30)), 4, **DENSE)
    return {
        "first_ms": 1e3 * first.first_s,
        "second_ms": 1e3 * second.first_s,
        "prompt_tokens": second.prompt_tokens,
        "cached_tokens": second.cached_tokens,
        "share": second.cached_tokens / second.prompt_tokens,
    }


def densified(server: Server, text: Text, length: int, repeats: int) -> dict[str, Any]:
    """Second turns, in turn after a sparse first one that was made dense and after a dense one as long ago."""
    times: dict[str, list[float]] = {"sparse": [], "dense": []}
    shares: dict[str, list[float]] = {"sparse": [], "dense": []}
    waits = []
    for _ in range(repeats):
        for arm, options in (("sparse", SPARSE), ("dense", DENSE)):
            messages, before = user(text.of(length)), made_dense(server)
            first = server.ask(messages, 8, **options)
            if first.report.get("mode") != ("sparse" if arm == "sparse" else "full"):
                raise BenchError(f"the {arm} first turn ran otherwise: {first.report}")
            if arm == "sparse":
                waits.append(until_made_dense(server, before + 1))
            else:
                time.sleep(waits[-1])
            second = server.ask(following(messages, first, text.of(20)), 4)
            times[arm].append(second.first_s)
            shares[arm].append(second.cached_tokens / second.prompt_tokens)
    after_sparse, after_dense = (statistics.median(times[arm]) for arm in ("sparse", "dense"))
    return {
        "after_sparse_ms": 1e3 * after_sparse,
        "after_dense_ms": 1e3 * after_dense,
        "ratio": after_sparse / after_dense,
        "cached_after_sparse": min(shares["sparse"]),
        "cached_after_dense": min(shares["dense"]),
        "made_dense_s": statistics.median(waits),
    }


def made_dense(server: Server) -> int:
    """How many sparse turns the server has made dense so far."""
    name = "specprefill_densified_requests_total "
    lines = server.client.get(f"{server.base}/metrics").text.splitlines()
    return int(float(next(line.removeprefix(name) for line in lines if line.startswith(name))))


def until_made_dense(server: Server, count: int, limit_s: float = 60.0) -> float:
    """Leave the server alone until that many are; the seconds."""
    begun = time.monotonic()
    while made_dense(server) < count:
        if time.monotonic() - begun > limit_s:
            raise BenchError("a sparse turn is not made dense")
        time.sleep(0.05)
    return time.monotonic() - begun


def prefix(server: Server, text: Text, shared: int, new: int, repeats: int) -> dict[str, Any]:
    """Four ways to the first token of the same kind of prompt: a shared system message and new text."""
    arms = {"cold_full": (False, DENSE), "prefix": (True, DENSE), "sparse": (False, SPARSE), "both": (True, SPARSE)}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(repeats):
        for arm, (warm, options) in arms.items():
            system = text.of(shared)
            if warm:
                server.ask(agent(system, text.of(10)), 1, **DENSE)
            reply = server.ask(agent(system, text.of(new)), 2, **options)
            if (reply.cached_tokens > shared // 2) != warm:
                raise BenchError(f"the {arm} arm found {reply.cached_tokens} cached tokens")
            times[arm].append(1e3 * reply.first_s)
    medians = {f"{arm}_ms": statistics.median(values) for arm, values in times.items()}
    return {"shared_tokens": shared, "new_tokens": new, **medians}


def resume(server: Server, text: Text, length: int) -> dict[str, Any]:
    messages = user(text.of(length))
    done = server.leave_half_way(messages)
    server.settle()
    again = server.ask(messages, 2, **DENSE)
    return {
        "done_tokens": done,
        "cached_tokens": again.cached_tokens,
        "prompt_tokens": again.prompt_tokens,
        "share": min(1.0, again.cached_tokens / done),
    }


def session(server: Server, text: Text, length: int) -> list[dict[str, Any]]:
    """An agent's seven turns, each sent as soon as the last is answered: a document, then tool results. Every turn
    brings a fact and asks for it."""
    rows = []
    for arm, options in (("sparse", {}), ("dense", DENSE)):
        messages, held = [{"role": "system", "content": "You are an agent. Tools: " + text.of(200)}], 0
        for turn, name in enumerate(NAMES, 1):
            fact, code = text.fact(name)
            filler = (text.of(length // 2), text.of(length // 2)) if turn == 1 else (text.of(30), text.of(30))
            asked = f"{filler[0]} {fact} {filler[1]}\n\nWhat is the secret code for {name}?"
            messages.append({"role": "user", "content": asked})
            reply = server.ask(messages, 16, **options)
            report = reply.report
            continued = report["continuation"]  # how much of the session a restart uses is not reported
            already = {None: reply.cached_tokens, "extend": held, "repair": held}.get(continued)
            fed = None if already is None else report["kept_tokens"] - already
            held = report["kept_tokens"] + reply.completion_tokens
            names = ("mode", "continuation", "prompt_tokens", "cached_tokens", "kept_tokens")
            row = {"arm": arm, "turn": turn, "ttft_ms": 1e3 * reply.first_s, "fed_tokens": fed}
            rows.append(row | {name: report[name] for name in names} | {"right": code in reply.text})
            messages.append({"role": "assistant", "content": reply.text})
    return rows


def session_figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Later turns of the sparse arm over the same turns of the dense arm, and the share of right answers."""
    first_s = {(row["arm"], row["turn"]): row["ttft_ms"] for row in rows}
    ratios = [first_s["sparse", turn] / first_s["dense", turn] for turn in range(2, len(NAMES) + 1)]
    ways = [row["continuation"] for row in rows]
    right = {arm: statistics.mean(row["right"] for row in rows if row["arm"] == arm) for arm in ("sparse", "dense")}
    return {
        "session_ratio": statistics.median(ratios),
        "session_worst_ratio": max(ratios),
        **{f"session_{way}s": ways.count(way) for way in ("extend", "repair", "restart")},
        "session_right_sparse": right["sparse"],
        "session_right_dense": right["dense"],
    }


def crowd(server: Server, text: Text, seconds: float, limit_s: float) -> list[dict[str, Any]]:
    """Short requests among clients that always have a long one under way. The last measurement: they are left there.

    Args:
        seconds: for which short requests are sent.
        limit_s: after these, those without a first token are given up: they count with the time that they waited.
    """
    idle = {
        length: [server.ask(user(text.of(length)), 2, **DENSE).first_s for _ in range(11)] for length in SHORT_LENGTHS
    }
    over = threading.Event()
    for _ in range(CLIENTS - SHORT_CLIENTS):
        threading.Thread(target=long_client, args=(server, text, over), daemon=True).start()
    time.sleep(5)
    until = time.monotonic() + seconds
    clients = [ShortClient(server, text) for _ in range(SHORT_CLIENTS)]
    threads = [threading.Thread(target=client.run, args=(until,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until + limit_s - time.monotonic()))
    over.set()
    return [waiting(length, idle[length], clients) for length in SHORT_LENGTHS]


def long_client(server: Server, text: Text, over: threading.Event) -> None:
    """One request after another, until the measurement is over or the server is gone."""
    rng = random.Random()
    while not over.is_set():
        length = round(LONG_LENGTHS[0] * (LONG_LENGTHS[1] / LONG_LENGTHS[0]) ** rng.random())
        try:
            server.ask(user(text.of(length)), rng.randint(16, 128), **DENSE)
        except (BenchError, httpx.HTTPError, RuntimeError) as error:
            if not over.is_set():
                print(f"note: a long request to {server.name} failed: {error}", file=sys.stderr)


class ShortClient:
    """Sends short requests with pauses between them.

    Attributes:
        seen: seconds to the first token, by length.
        asked: the length of the request under way and when it was sent, by the monotonic clock.
    """

    def __init__(self, server: Server, text: Text) -> None:
        self._server = server
        self._text = text
        self.seen: dict[int, list[float]] = {length: [] for length in SHORT_LENGTHS}
        self.asked: tuple[int, float] | None = None

    def run(self, until: float) -> None:
        """What fails, such as a request that was given up with its server, goes on counting as unanswered."""
        try:
            self._ask(until)
        except (BenchError, httpx.HTTPError, RuntimeError) as error:
            if time.monotonic() < until:
                print(f"note: a short request to {self._server.name} failed: {error}", file=sys.stderr)

    def _ask(self, until: float) -> None:
        rng = random.Random()
        while time.monotonic() < until:
            for length, seen in self.seen.items():
                time.sleep(rng.uniform(0.5, 2))
                self.asked = length, time.monotonic()
                seen.append(self._server.ask(user(self._text.of(length)), 8, **DENSE).first_s)
                self.asked = None

    def waits(self, length: int) -> list[float]:
        """Seconds that the request under way has waited, if it is of this length."""
        asked = self.asked
        return [time.monotonic() - asked[1]] if asked is not None and asked[0] == length else []


def waiting(length: int, idle: list[float], clients: list[ShortClient]) -> dict[str, Any]:
    answered = [first for client in clients for first in client.seen[length]]
    unanswered = [wait for client in clients for wait in client.waits(length)]
    seen = sorted(answered + unanswered)
    if not seen:  # every client still waits for another request
        return {"tokens": length, "requests": 0, "unanswered": 0, "p99_ratio": None}
    usual, worst = statistics.median(idle), seen[min(len(seen) - 1, int(0.99 * len(seen)))]
    return {
        "tokens": length,
        "requests": len(seen),
        "unanswered": len(unanswered),
        "idle_ms": 1e3 * usual,
        "p50_ms": 1e3 * statistics.median(seen),
        "p99_ms": 1e3 * worst,
        "p99_ratio": worst / usual,
    }


# --- the whole -------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "models/demo/target")
    parser.add_argument("--draft", type=Path, default=ROOT / "models/demo/draft")
    parser.add_argument("--tokens", type=int, default=128, help="length of each answer when streams are compared")
    parser.add_argument("--long", type=int, default=12000, help="tokens of the prompt that others arrive behind")
    parser.add_argument("--length", type=int, default=4000, help="tokens of the other long prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crowd-s", type=float, default=180.0, help="seconds for which short requests are sent")
    parser.add_argument("--crowd-limit-s", type=float, default=120.0, help="after these, for their first tokens")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="these measurements only, by name")
    parser.add_argument("--start-s", type=float, default=90.0, help="seconds that a server may take to start")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; under five minutes")
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.long, options.length, options.repeats, options.crowd_s = 128, 6000, 2500, 1, 45
        options.crowd_limit_s = 45
    for folder in (options.target, options.draft):
        if not (folder / "model.safetensors").is_file():
            parser.error(f"no checkpoint in {folder}")
    return options


def measure_ours(options: argparse.Namespace, stack: ExitStack, copies: tuple[Path, Path], log: Path) -> dict[str, Any]:
    command = module("mlx_specprefill_server", "serve", "--target", str(copies[0]), "--draft", str(copies[1]))
    more = ["--dtype", "float32", "--specprefill-threshold", "512"]
    server = stack.enter_context(running("mlx-specprefill", command + more, log, options.start_s))
    text, repeats, length = Text(0), options.repeats, options.length
    text.calibrate(server)
    steps: dict[str, Callable[[], Any]] = {
        "streams": lambda: streams(server, text, options.tokens, repeats + 2),
        "behind": lambda: behind(server, text, options.long, repeats),
        "turns": lambda: turns(server, text, 3000),
        "densified": lambda: densified(server, text, length, 2 * repeats + 3),
        "prefix": lambda: prefix(server, text, length // 2, length, repeats),
        "resume": lambda: resume(server, text, 2 * length),
        "session": lambda: session(server, text, 4000),
        "crowd": lambda: crowd(server, text, options.crowd_s, options.crowd_limit_s),
    }
    return {name: timed(name, step) for name, step in wanted(steps, options)}


def measure_peer(options: argparse.Namespace, stack: ExitStack, copy: Path, log: Path) -> dict[str, Any]:
    command = module("mlx_lm.server", "--model", str(copy))
    server = stack.enter_context(running("mlx_lm.server", command, log, options.start_s, **preload()))
    text = Text(0)
    text.calibrate(server)
    steps: dict[str, Callable[[], Any]] = {
        "streams": lambda: streams(server, text, options.tokens, options.repeats + 2),
        "behind": lambda: behind(server, text, options.long, options.repeats),
        "turns": lambda: turns(server, text, 3000),
        "crowd": lambda: crowd(server, text, options.crowd_s, options.crowd_limit_s),
    }
    return {name: timed(f"{name}, mlx_lm.server", step) for name, step in wanted(steps, options)}


def wanted(steps: dict[str, Callable[[], Any]], options: argparse.Namespace) -> list[tuple[str, Callable[[], Any]]]:
    return [(name, step) for name, step in steps.items() if not options.parts or name in options.parts]


def timed(name: str, step: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    result = step()
    print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return result


def show(results: dict[str, dict[str, Any]], console: Console) -> None:
    for name, parts in results.items():
        table = Table("", "", title=name, show_header=False)
        for part, figures in parts.items():
            for figure in figures if isinstance(figures, list) else [figures]:
                line = "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in figure.items()
                )
                table.add_row(part, line)
        console.print(table)


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    ours = results["mlx-specprefill"]
    figures = {
        "batch_gain": ("streams", "gain"),
        "short_behind_long_ratio": ("behind", "ratio"),
        "second_turn_cached_share": ("turns", "share"),
        "densified_ratio": ("densified", "ratio"),
        "resume_share": ("resume", "share"),
    }
    return {
        "benchmark": "serving",
        "device": str(mx.default_device()),
        "blas": BLAS.library,
        "mlx": mx.__version__,
        **{name: ours[part][figure] for name, (part, figure) in figures.items() if part in ours},
        **(session_figures(ours["session"]) if "session" in ours else {}),
        **{
            f"{prefix}crowd_{row['tokens']}_p99_ratio": row["p99_ratio"]
            for prefix, server in (("", "mlx-specprefill"), ("peer_", "mlx_lm.server"))
            for row in results.get(server, {}).get("crowd", [])
        },
        "rows": results,
    }


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with this process
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            copies = (
                copy_checkpoint(options.target, folder / "target"),
                copy_checkpoint(options.draft, folder / "draft"),
            )
            with ExitStack() as stack:
                results["mlx-specprefill"] = measure_ours(options, stack, copies, folder / "ours.log")
            if not options.alone:
                with ExitStack() as stack:
                    results["mlx_lm.server"] = measure_peer(options, stack, copies[0], folder / "peer.log")
        except (BenchError, httpx.HTTPError) as error:
            print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    show(results, Console(width=160))
    print(json.dumps(rounded(summary(results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
