"""What a grammar costs while decoding: the same rows with and without one, in one run.

Both arms continue copies of one prompt greedily and take turns in blocks of steps, so that whatever else the machine
does meets both. The guided rows write an endless JSON array of objects. The overhead is the median over pairs of
blocks; `mask` is the host's own time per row and token for following the grammar and making the mask, most of which
passes while the forward runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from typing import Any

import mlx.core as mx

from mlx_specprefill import BLAS, Constraint, ModelPair
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.constraints import Grammars, GrammarState
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.sampling import greedy

from .harness import pairs
from .harness.figures import Clock, ratio, show_rows
from .harness.stages import full_prefill

QUICK = {"blocks": 10}
BLOCK = 16  # steps between two changes of arm
PROMPT = "The ship sailed on and nobody on board knew where it was going. " * 20
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "tags": {"items": {"enum": ["a", "b"]}}},
        "required": ["name", "n", "tags"],
        "additionalProperties": False,
    },
}  # fmt: skip


class TimedState:
    """A state that notes how long the thread was busy with it."""

    def __init__(self, state: GrammarState, spent: list[float]) -> None:
        self._state = state
        self._spent = spent

    def accept(self, token: int) -> None:
        begun = time.thread_time()
        self._state.accept(token)
        self._spent.append(time.thread_time() - begun)

    def allowed(self, size: int) -> Any:
        begun = time.thread_time()
        mask = self._state.allowed(size)
        self._spent[-1:] = [sum(self._spent[-1:]) + time.thread_time() - begun]
        return mask


def batch(pair: ModelPair, states: list[Any]) -> DecodeBatch:
    """Copies of one prefilled row, each with its state."""
    cache = make_positioned_cache(pair.target)
    logits = full_prefill(pair.target, cache, pair.tokenizer.encode(PROMPT), 512)
    decoding = DecodeBatch(pair.target)
    for uid, state in enumerate(states):
        decoding.add(DecodeRow(uid, copy.deepcopy(cache), logits, greedy, grammar=state))
    return decoding


def run_block(decoding: DecodeBatch) -> dict[str, float]:
    """Milliseconds per step. Nothing of one arm still runs when the other begins."""
    mx.synchronize()
    clock = Clock()
    for _ in range(BLOCK):
        decoding.step()
    mx.synchronize()
    return {name: ms / BLOCK for name, ms in clock.read().items()}


def measure(pair: ModelPair, rows: int, blocks: int) -> dict[str, float]:
    """Milliseconds per step of all rows, microseconds per mask; the overheads are of wall and of CPU time."""
    grammars = Grammars(pair.tokenizer, pair.eos_token_ids)
    constraint = Constraint(f"start: %json {json.dumps(SCHEMA)}")
    spent: list[float] = []
    states = [TimedState(grammars.state(constraint, pair.eos_token_ids), spent) for _ in range(rows)]
    arms = {"free": batch(pair, [None] * rows), "guided": batch(pair, states)}
    for decoding in arms.values():
        run_block(decoding)  # not counted
    spent.clear()
    times: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for turn in range(blocks):
        for name in ("free", "guided") if turn % 2 else ("guided", "free"):
            times[name].append(run_block(arms[name]))
    wall, cpu = ({name: [block[clock] for block in times[name]] for name in arms} for clock in ("ms", "cpu_ms"))
    return {
        "rows": rows,
        "free_ms": statistics.median(wall["free"]),
        "guided_ms": statistics.median(wall["guided"]),
        "overhead": ratio(wall["guided"], wall["free"]) - 1,
        "cpu_overhead": ratio(cpu["guided"], cpu["free"]) - 1,
        "mask_us": 1e6 * statistics.fmean(spent),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--blocks", type=int, default=30, help=f"of {BLOCK} steps, per arm")


def run(options: argparse.Namespace) -> dict[str, Any]:
    pair = pairs.loaded(options)
    cells = [measure(pair, rows, options.blocks) for rows in options.rows]
    show_rows(cells)
    return {"target": pair.target_id, "blas": BLAS.library, "cells": cells}
