"""The server under load: streams, fairness, caches and sessions over HTTP, beside `mlx_lm.server`.

    streams   tokens per second of 8 streams at once over one alone
    behind    time to first token of a short request sent into a long prefill, over the same on an idle server
    turns     how much of an agent's second turn comes from the cache after a dozen unrelated requests
    densified the second turn after a sparse first one (made dense in idle time), over the same after a dense one
    prefix    cold full, cached prefix, sparse, and both, on one shared prefix and new text after it
    resume    a full prefill cancelled half way and sent again
    session   seven turns of an agent without a pause, sparse and dense
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .harness import BenchError, servers
from .harness.figures import machine, rounded, show_rows, timed
from .harness.servers import DENSE, SPARSE, Copies, Server, together
from .harness.text import NAMES, Text, agent, following, question, secret, user

QUICK = {"long": 6000, "length": 2500, "repeats": 1, "crowd_s": 45.0, "crowd_limit_s": 45.0}
STREAMS = 8
UNRELATED = 12
SHORT = 600  # tokens of the request that arrives late: what coding agents ask for a title with
CLIENTS, SHORT_CLIENTS = 64, 8  # in the crowd, and those of them that send short requests
SHORT_LENGTHS = (11, SHORT)  # tokens, in turn
LONG_LENGTHS = (1000, 4000)  # tokens; of the other clients
TURNS = 7  # of a session
PARTS = ("streams", "behind", "turns", "densified", "prefix", "resume", "session", "crowd")

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
    replies = together(lambda prompt: server.ask(prompt, tokens, **DENSE), prompts)
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
    lines = server.get("/metrics").text.splitlines()
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
        for turn, name in enumerate(NAMES[:TURNS], 1):
            code = text.code()
            filler = (text.of(length // 2), text.of(length // 2)) if turn == 1 else (text.of(30), text.of(30))
            asked = f"{filler[0]} {secret(name, code)} {filler[1]}\n\n{question(name)}"
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
    ratios = [first_s["sparse", turn] / first_s["dense", turn] for turn in range(2, TURNS + 1)]
    ways = [row["continuation"] for row in rows]
    right = {arm: statistics.mean(row["right"] for row in rows if row["arm"] == arm) for arm in ("sparse", "dense")}
    return {
        "session_ratio": statistics.median(ratios),
        "session_worst_ratio": max(ratios),
        **{f"session_{way}s": ways.count(way) for way in ("extend", "repair", "restart")},
        "session_right_sparse": right["sparse"],
        "session_right_dense": right["dense"],
    }


@dataclass
class Short:
    """A short request of the crowd. Seconds, `sent` by the monotonic clock; `first_s` is None until its first token."""

    length: int
    sent: float
    first_s: float | None = None


def crowd(server: Server, text: Text, seconds: float, limit_s: float) -> list[dict[str, Any]]:
    """Short requests among clients that always have a long one under way. The last measurement: they are left there.

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
    """One request after another, until the measurement is over or the server is gone."""
    rng = random.Random()
    while not over.is_set():
        length = round(LONG_LENGTHS[0] * (LONG_LENGTHS[1] / LONG_LENGTHS[0]) ** rng.random())
        try:
            server.ask(user(text.of(length)), rng.randint(16, 128), **DENSE)
        except BenchError as error:
            if not over.is_set():
                print(f"note: a long request failed: {error}", file=sys.stderr)


def short_client(server: Server, text: Text, until: float, asked: list[Short]) -> None:
    """Requests with pauses between them. After one that fails there are no more: it counts as unanswered."""
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
    parser.add_argument("--tokens", type=int, default=128, help="length of each answer when streams are compared")
    parser.add_argument("--long", type=int, default=12000, help="tokens of the prompt that others arrive behind")
    parser.add_argument("--length", type=int, default=4000, help="tokens of the other long prompts")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crowd-s", type=float, default=180.0, help="seconds for which short requests are sent")
    parser.add_argument("--crowd-limit-s", type=float, default=120.0, help="after these, for their first tokens")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--alone", action="store_true", help="without mlx_lm.server")


def run(options: argparse.Namespace) -> dict[str, Any]:
    with servers.copies(options) as copies:
        results = {"mlx-specprefill": measure_ours(options, copies)}
        if not options.alone:
            results["mlx_lm.server"] = measure_peer(options, copies)
    for name, parts in results.items():
        for part, figures in parts.items():
            show_rows(figures if isinstance(figures, list) else [figures], f"{name}: {part}")
    return rounded(summary(results))


def measure_ours(options: argparse.Namespace, copies: Copies) -> dict[str, Any]:
    text, repeats, length = Text(0), options.repeats, options.length
    with copies.ours("--specprefill-threshold", "512") as server:
        steps = common_parts(server, text, options) | {
            "densified": lambda: densified(server, text, length, 2 * repeats + 3),
            "prefix": lambda: prefix(server, text, length // 2, length, repeats),
            "resume": lambda: resume(server, text, 2 * length),
            "session": lambda: session(server, text, 4000),
        }
        return measured(server, text, steps, options)


def measure_peer(options: argparse.Namespace, copies: Copies) -> dict[str, Any]:
    text = Text(0)
    with copies.mlx_lm() as server:
        return measured(server, text, common_parts(server, text, options), options)


def common_parts(server: Server, text: Text, options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """What any server can be asked."""
    return {
        "streams": lambda: streams(server, text, options.tokens, options.repeats + 2),
        "behind": lambda: behind(server, text, options.long, options.repeats),
        "turns": lambda: turns(server, text, 3000),
        "crowd": lambda: crowd(server, text, options.crowd_s, options.crowd_limit_s),
    }


def measured(
    server: Server, text: Text, steps: dict[str, Callable[[], Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """The wanted parts, in the order of `PARTS`: the crowd is left where it is and comes last."""
    text.calibrate(server)
    results = {}
    for name in PARTS:
        if name in options.parts and name in steps:
            ms, results[name] = timed(steps[name])
            print(f"{name}, {server.name}: {ms / 1e3:.0f} s", file=sys.stderr, flush=True)
    return results


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
        **machine(),
        **{name: ours[part][figure] for name, (part, figure) in figures.items() if part in ours},
        **(session_figures(ours["session"]) if "session" in ours else {}),
        **{
            f"{prefix}crowd_{row['tokens']}_p99_ratio": row["p99_ratio"]
            for prefix, server in (("", "mlx-specprefill"), ("peer_", "mlx_lm.server"))
            for row in results.get(server, {}).get("crowd", [])
        },
        "rows": results,
    }
