#!/usr/bin/env python3
"""What a grammar costs while decoding: the same rows with and without one, in one run.

Both arms continue copies of one prompt greedily and take turns in blocks of steps, so that whatever else the machine
does meets both. The guided rows write an endless JSON array of objects. The overhead is the median over pairs of
blocks; `mask` is the host's own time per row and token for following the grammar and making the mask, most of which
passes while the forward runs.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_specprefill import BLAS, Constraint, ModelPair, SpecPrefillError, load_pair

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)

from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.constraints import Grammars, Guide
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.sampling import greedy

ROOT = Path(__file__).resolve().parent.parent
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


@dataclass(frozen=True)
class Cell:
    """Milliseconds per step of all rows; microseconds per mask. `cpu_overhead` is that of the process's CPU time."""

    rows: int
    free_ms: float
    guided_ms: float
    overhead: float
    cpu_overhead: float
    mask_us: float


@dataclass(frozen=True)
class Block:
    """Per step, in ms."""

    wall: float
    cpu: float


class TimedGuide:
    """A guide that notes how long the thread was busy with it."""

    def __init__(self, guide: Guide, spent: list[float]) -> None:
        self._guide = guide
        self._spent = spent

    def accept(self, token: int) -> None:
        begun = time.thread_time()
        self._guide.accept(token)
        self._spent.append(time.thread_time() - begun)

    def allowed(self, size: int) -> Any:
        begun = time.thread_time()
        mask = self._guide.allowed(size)
        self._spent[-1:] = [sum(self._spent[-1:]) + time.thread_time() - begun]
        return mask


def prefilled(pair: ModelPair) -> tuple[list[Any], mx.array]:
    cache = make_positioned_cache(pair.target)
    tokens = mx.array(pair.tokenizer.encode(PROMPT))[None]
    logits = pair.target(tokens, cache=cache)[:, -1, :]
    mx.eval(logits, [part.state for part in cache])
    return cache, logits


def batch(pair: ModelPair, rows: int, guides: list[Any]) -> DecodeBatch:
    cache, logits = prefilled(pair)
    decoding = DecodeBatch(pair.target)
    for uid in range(rows):
        decoding.add(DecodeRow(uid, copy.deepcopy(cache), logits, greedy, guide=guides[uid] if guides else None))
    return decoding


def run_block(decoding: DecodeBatch) -> Block:
    """Nothing of one arm still runs when the other begins."""
    mx.synchronize()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(BLOCK):
        decoding.step()
    mx.synchronize()
    return Block(1e3 * (time.perf_counter() - begun) / BLOCK, 1e3 * (time.process_time() - cpu) / BLOCK)


def measure(pair: ModelPair, rows: int, blocks: int) -> Cell:
    grammars = Grammars(pair.tokenizer, pair.eos_token_ids)
    constraint = Constraint(f"start: %json {json.dumps(SCHEMA)}")
    spent: list[float] = []
    guides = [TimedGuide(grammars.guide(constraint, pair.eos_token_ids), spent) for _ in range(rows)]
    free, guided = batch(pair, rows, []), batch(pair, rows, guides)
    run_block(free), run_block(guided)  # not counted
    spent.clear()
    times = []
    for turn in range(blocks):
        order = (free, guided) if turn % 2 else (guided, free)
        first, second = run_block(order[0]), run_block(order[1])
        times.append((first, second) if turn % 2 else (second, first))
    return Cell(
        rows,
        statistics.median(a.wall for a, _ in times),
        statistics.median(b.wall for _, b in times),
        statistics.median(b.wall / a.wall for a, b in times) - 1,
        statistics.median(b.cpu / a.cpu for a, b in times) - 1,
        1e6 * statistics.fmean(spent),
    )


def show(cells: list[Cell]) -> None:
    table = Table("rows", "free, ms", "guided, ms", "overhead", "CPU overhead", "mask, us per row")
    for cell in cells:
        times = [f"{cell.free_ms:.2f}", f"{cell.guided_ms:.2f}", f"{cell.overhead:.1%}", f"{cell.cpu_overhead:.1%}"]
        table.add_row(str(cell.rows), *times, f"{cell.mask_us:.0f}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "models/demo/target"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--blocks", type=int, default=30, help=f"of {BLOCK} steps, per arm")
    options = parser.parse_args()
    try:
        pair = load_pair(options.target)
    except SpecPrefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = [measure(pair, rows, options.blocks) for rows in options.rows]
    show(cells)
    print(json.dumps({"target": pair.target_id, "blas": BLAS.library, "cells": [asdict(cell) for cell in cells]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
