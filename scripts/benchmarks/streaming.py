"""Processor time per streamed token beside the model, of two commits: per dialect, streams at once, and thread.

The target is the pair's cut down to its first layer, so that a step is short. Figures are microseconds per token:

    chat_8_loop    of the event loop (HTTP, text of answers, JSON), with eight streams of /v1/chat/completions at once
    chat_8_engine  of the MLX thread, where the engine runs, without the models' calls and the queueing of their work
    chat_8_model   what these take on that thread; what MLX's own threads take is in no figure

and so on for completions, messages and responses. Each commit runs in a worktree of its own, in turns (old, new, new,
old), as for `guard`. Processor time suffers less than wall time from what else runs on the machine, but it does. Linux
only: threads are told apart by /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx

from .guard import Arm, serving, shown
from .harness import BenchError, commits, servers
from .harness.alternating import Figures, Pairs, Step, take_turns
from .harness.commits import Commit
from .harness.figures import machine, rounded
from .harness.servers import Copies, Server, together
from .harness.text import user

QUICK = {"rounds": 1, "tokens": 64, "streams": [8], "dialects": ["chat"]}
QUESTION = "Tell me about the river."
COMMON = {"stream": True, "temperature": 0, "ignore_eos": True, "specprefill": False}
BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # path, how it calls the length, the rest of the body
    "chat": ("/v1/chat/completions", "max_tokens", {"messages": user(QUESTION)}),
    "completions": ("/v1/completions", "max_tokens", {"prompt": QUESTION}),
    "messages": ("/v1/messages", "max_tokens", {"messages": user(QUESTION)}),
    "responses": ("/v1/responses", "max_output_tokens", {"input": QUESTION}),
}
PROGRAM = Path(__file__).parent / "harness" / "measured_server.py"
SHORT = 16  # tokens of the answers whose time is subtracted: what a request takes besides its tokens
LAYER = re.compile(r"\.layers\.(\d+)\.")


def add_options(parser: argparse.ArgumentParser) -> None:
    servers.add_options(parser)
    parser.add_argument("--old", default="HEAD~1", help="commit, branch or tag that is the measure; default HEAD~1")
    parser.add_argument("--new", default="HEAD", help="the other one; default HEAD")
    parser.add_argument("--rounds", type=int, default=3, help="of four measurements each")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32], help="at once")
    parser.add_argument("--dialects", nargs="+", choices=list(BODIES), default=list(BODIES))


def run(options: argparse.Namespace) -> dict[str, Any]:
    with (
        commits.checked_out({"old": options.old, "new": options.new}) as (old, new),
        servers.copies(options) as copies,
        both_serving(old, new, copies) as arms,
    ):
        pairs, steps = Pairs(), steps_of(options)
        for arm in arms:  # the first answers of a process compile and cache
            for step in steps.values():
                step(arm, 0)
        for turn in range(options.rounds):
            take_turns(*arms, steps, turn, pairs)
    compared = pairs.compared()
    shown(old, new, compared)
    described = {commit.name: {"commit": commit.sha, "title": commit.title} for commit in (old, new)}
    figures = {name: {**asdict(one), "verdict": one.verdict} for name, one in compared.items()}
    head = {"benchmark": "streaming", **machine(), **described, "load": os.getloadavg()[0]}
    report: dict[str, Any] = rounded({**head, "figures": figures})
    return report


@contextmanager
def both_serving(old: Commit, new: Commit, copies: Copies) -> Iterator[tuple[Arm, Arm]]:
    keep_first_layer(copies.target)
    with ExitStack() as stack:
        for commit in (old, new):
            commit.check()
        first, second = (Arm(commit, stack.enter_context(measured_server(commit, copies))) for commit in (old, new))
        yield first, second


def measured_server(commit: Commit, copies: Copies) -> Any:
    kind = json.loads((copies.target / "config.json").read_text())["model_type"]
    return serving(
        commit, copies, str(PROGRAM), MODEL_TIME_FILE=str(copies.folder / f"{commit.name}.model"), MODEL_TYPE=kind
    )


def keep_first_layer(folder: Path) -> None:
    """Of a checkpoint."""
    file, config = folder / "model.safetensors", folder / "config.json"
    weights = {name: array for name, array in mx.load(str(file)).items() if _layer(name) == 0}
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))


def _layer(name: str) -> int:
    found = LAYER.search(name)
    return int(found[1]) if found else 0


def steps_of(options: argparse.Namespace) -> dict[str, Step[Arm]]:
    def step(dialect: str, streams: int) -> Step[Arm]:
        return lambda arm, _: spent(arm.server, dialect, streams, options.tokens)

    return {f"{dialect}_{count}": step(dialect, count) for dialect in options.dialects for count in options.streams}


def spent(server: Server, dialect: str, streams: int, tokens: int) -> Figures:
    """Microseconds of processor time per token: what longer answers take beyond short ones."""
    short, long = (answered(server, dialect, streams, count) for count in (SHORT, SHORT + tokens))
    return {f"{dialect}_{streams}_{name}": (long[name] - short[name]) / (streams * tokens) for name in long}


def answered(server: Server, dialect: str, streams: int, tokens: int) -> dict[str, float]:
    """Microseconds for so many answers at once."""
    path, length, body = BODIES[dialect]
    asked = json.dumps({**COMMON, **body, length: tokens}).encode()
    before = used_us(server)
    together(lambda _: drain(server.base, path, asked), range(streams))
    return {name: us - before[name] for name, us in used_us(server).items()}


def drain(base: str, path: str, body: bytes) -> None:
    """Read one answer without looking at it: what a client takes to parse it would slow down the server beside it."""
    connection = HTTPConnection(base.removeprefix("http://"), timeout=300)
    with closing(connection):
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if response.status != 200:
            raise BenchError(f"{path}: status {response.status}: {text.decode()[:300]}")


def used_us(server: Server) -> dict[str, float]:
    """Processor time so far, microseconds.

    Raises:
        BenchError: the system doesn't tell that of each thread.
    """
    engine, model_s = struct.unpack("qd", server.log.with_suffix(".model").read_bytes())
    try:
        loop_us, engine_us = (thread_us(server.pid, thread) for thread in (server.pid, engine))
    except OSError as error:
        raise BenchError(f"this takes Linux, which tells what each thread has used: {error}") from error
    return {"loop": loop_us, "engine": engine_us - 1e6 * model_s, "model": 1e6 * model_s}


def thread_us(pid: int, thread: int) -> float:
    nanoseconds, *_ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    return int(nanoseconds) / 1e3
