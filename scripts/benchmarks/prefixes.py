"""The prefix cache at long contexts: look-ups, hits, stores that evict, and reading back from disk.

Nothing is prefilled: the caches of a narrow random model are filled with noise and stored.

    find        many conversations of few bytes: a look-up among them, with the assembly of what it found
    hit         one conversation of real bytes: its look-up, and the forward of what follows it. "alone" is that forward
                on a cache that is in memory already; what a hit takes beyond it is `over_ms`
    store       a prompt into a full cache, beside the same into an empty one; and evictions alone, per block
    disk        the conversation after a restart: its look-up, beside reading one file of as many bytes. Where the
                system can be told to forget them, files come from the disk and not from its cache (`cold`)

    find_ms, hit_lookup_ms, hit_over_ms, store_evicting_ms, evict_us, disk_share
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.tree import PrefixCache
from mlx_specprefill.shapes import random_model
from mlx_specprefill.specprefill.sparse_prefill import prefill

from .harness import BenchError
from .harness.figures import Clock, machine, rounded, show_rows, timed
from .harness.stages import finish
from .long import narrow

PARTS = ("find", "hit", "store", "disk")
QUICK = {"tokens": 16384, "sessions": 8, "layers": 8, "repeats": 3}
FOLLOWING = 16  # tokens behind a hit
STORED = 4096  # tokens of the prompts that evict
MUCH = 1 << 44  # bytes
CHUNK = 1 << 24  # bytes read at once from the file that shows what the disk can do

Make = Callable[[], list[Any]]


def conversation(seed: int, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 1000, tokens, dtype=np.int32)


def filled(make: Make, tokens: int, width: int) -> list[Any]:
    """A model's cache with noise for so many tokens, one head of `width`."""
    cache = make()
    for part in cache:
        keys, values = (mx.random.normal((1, 1, tokens, width)) for _ in range(2))
        part.update_and_fetch(keys, values)
        mx.eval(part.state)
    return cache


def bare(layers: int) -> Make:
    return lambda: [KVCache() for _ in range(layers)]


def median_of(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def found(prefixes: PrefixCache, tokens: Any, limit: int) -> tuple[float, list[Any]]:
    """Milliseconds of a look-up, and the cache."""
    ms, hit = timed(lambda: prefixes.lookup(tokens, limit))
    if hit is None or hit.length != limit:
        raise BenchError(f"the prefix cache held {0 if hit is None else hit.length} of {limit} tokens")
    return ms, hit.cache


# --- parts -----------------------------------------------------------------------------------------------------------


def find(options: argparse.Namespace) -> dict[str, float]:
    """Keys and values of one number each: what is left is what doesn't depend on bytes."""
    make = bare(options.layers)
    prefixes, tokens = PrefixCache("find", make, ByteBudget(MUCH)), options.tokens
    for seed in range(options.sessions):
        prefixes.store(conversation(seed, tokens), filled(make, tokens, 1))
    rows = []
    for repeat in range(options.repeats):
        wanted = np.append(conversation(repeat % options.sessions, tokens), np.arange(FOLLOWING, dtype=np.int32))
        covers_ms, _ = timed(lambda wanted=wanted: prefixes.covers(wanted))
        rows.append({"find_covers_ms": covers_ms, "find_ms": found(prefixes, wanted, tokens)[0]})
    return median_of(rows)


def hit(options: argparse.Namespace) -> dict[str, float]:
    model = random_model(narrow(options.layers, 1, 64, 2 * options.tokens) | {"vocab_size": 1000})
    mx.eval(model.parameters())
    make, tokens = (lambda: make_positioned_cache(model)), conversation(0, options.tokens)
    prefixes = PrefixCache("hit", make, ByteBudget(MUCH))
    prefixes.store(tokens, filled(make, tokens.size, 64))
    wanted = np.append(tokens, np.arange(FOLLOWING, dtype=np.int32))
    behind_hit(model, prefixes, wanted)  # compiles; not counted
    return {"hit_mib": prefixes.nbytes / 2**20} | median_of(
        [behind_hit(model, prefixes, wanted) for _ in range(options.repeats)]
    )


def behind_hit(model: Any, prefixes: PrefixCache, wanted: Any) -> dict[str, float]:
    """The look-up of all but the last tokens and the forward of these, twice over the same cache."""
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    lookup_ms, cache = found(prefixes, wanted, len(wanted) - FOLLOWING)
    forward_ms, _ = timed(lambda: forward(model, cache, wanted[-FOLLOWING:]))
    peak = (mx.get_peak_memory() - held) / 2**20
    for part in cache:
        part.trim(FOLLOWING)
    alone_ms, _ = timed(lambda: forward(model, cache, wanted[-FOLLOWING:]))
    over = lookup_ms + forward_ms - alone_ms
    return {
        "hit_lookup_ms": lookup_ms,
        "hit_forward_ms": forward_ms,
        "hit_alone_ms": alone_ms,
        "hit_over_ms": over,
        "hit_peak_mib": peak,
    }


def forward(model: Any, cache: list[Any], tokens: Any) -> None:
    mx.eval(finish(prefill(model, cache, tokens, None, len(tokens))))


def store(options: argparse.Namespace) -> dict[str, float]:
    """Prompts of 4096 tokens one after the other; the cache has room for as many as `--sessions` long ones' tails."""
    make = bare(options.layers)
    source = filled(make, STORED, 64)
    mib = sum(part.nbytes for part in source)
    long = filled(make, options.tokens, 64)
    budget = ByteBudget(2 * sum(part.nbytes for part in long) + mib)
    prefixes = PrefixCache("store", make, budget)
    first_ms, _ = timed(lambda: prefixes.store(conversation(0, STORED), source))
    prefixes.store(conversation(1, options.tokens), long)
    prefixes.store(conversation(2, options.tokens), long)
    del long
    rows = []
    for repeat in range(options.repeats):
        before = budget.evictions
        ms, _ = timed(lambda repeat=repeat: prefixes.store(conversation(3 + repeat, STORED), source))
        rows.append({"store_evicting_ms": ms, "store_evicted": budget.evictions - before})
    before, begun = budget.evictions, time.perf_counter()
    budget.shrink(budget.used // 2)
    evict_us = 1e6 * (time.perf_counter() - begun) / (budget.evictions - before)
    return {"store_mib": mib / 2**20, "store_ms": first_ms, **median_of(rows), "evict_us": evict_us}


def disk(options: argparse.Namespace) -> dict[str, float]:
    make, tokens = bare(options.layers), conversation(0, options.tokens)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        tier = DiskTier(folder, MUCH, pending_limit=MUCH)
        begun = time.perf_counter()
        PrefixCache("disk", make, ByteBudget(MUCH), tier).store(tokens, filled(make, tokens.size, 64))
        tier.flush()
        written = time.perf_counter() - begun
        tier.close()
        files = sorted(Path(folder).glob("*.safetensors"))
        plain = Path(folder) / "plain"
        nbytes = one_file(files, plain)
        rows = [restored(Path(folder), make, tokens, files, plain) for _ in range(options.repeats)]
    median = median_of(rows)
    speed = {f"disk_{name}_mib_s": nbytes / 2**20 / (median[f"disk_{name}_ms"] / 1e3) for name in ("file", "restore")}
    return {"disk_mib": nbytes / 2**20, "disk_write_s": written, **median, **speed}


def one_file(files: list[Path], to: Path) -> int:
    """All of them as one; its bytes."""
    with to.open("wb") as file:
        for part in files:
            file.write(part.read_bytes())
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def restored(folder: Path, make: Make, tokens: Any, files: list[Path], plain: Path) -> dict[str, float]:
    told = [forgotten(file) for file in (plain, *files)]
    file_ms, _ = timed(lambda: read_through(plain))
    tier = DiskTier(folder, MUCH)
    prefixes = PrefixCache("disk", make, ByteBudget(MUCH), tier)
    clock = Clock()
    restore_ms, _ = found(prefixes, tokens, tokens.size - 1)
    cpu_ms = clock.read()["cpu_ms"]
    tier.close()
    return {
        "disk_cold": all(told),
        "disk_file_ms": file_ms,
        "disk_restore_ms": restore_ms,
        "disk_restore_cpu_ms": cpu_ms,
        "disk_share": file_ms / restore_ms,
    }


def read_through(path: Path) -> None:
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forgotten(path: Path) -> bool:
    """Whether the system's cache of files has been told to drop this one; not every system can be."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


# --- start -----------------------------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sessions", type=int, default=50, help="conversations to find one among")
    parser.add_argument("--tokens", type=int, default=65536, help="of each conversation")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; otherwise where temporary files go")


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.tokens < STORED or min(options.sessions, options.layers, options.repeats) < 1:
        raise BenchError(f"--tokens must be at least {STORED}; --sessions, --layers and --repeats at least 1")
    parts = {"find": find, "hit": hit, "store": store, "disk": disk}
    figures: dict[str, float] = {}
    for name in options.parts:
        mx.random.seed(0)
        figures |= parts[name](options)
        mx.clear_cache()
    show_rows([{"figure": name, "median": value} for name, value in figures.items()])
    size = {name: getattr(options, name) for name in ("sessions", "tokens", "layers", "repeats")}
    report: dict[str, Any] = rounded({"benchmark": "prefixes", **machine(), **size, **figures})
    return report
