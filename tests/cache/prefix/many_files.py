"""Print how long a start takes with 5 000 stored blocks: `python -m tests.cache.prefix.many_files FOLDER`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from tests.cache.prefix.stores import filled

BLOCKS, BLOCK, LAYERS = 5_000, 256, 32
NAMES = ("target", "draft")


def open_caches(folder: Path) -> tuple[DiskTier, StoredPrefixCache]:
    """Return the cache of a target, opened before that of a draft, as a server does."""
    disk = DiskTier(folder, 1 << 40)
    target, _ = (StoredPrefixCache(disk, False, name, make_cache, ByteBudget(1 << 30), BLOCK) for name in NAMES)
    return disk, target


def make_cache() -> list[Any]:
    return [KVCache() for _ in range(LAYERS)]


make_cache.dtype, make_cache.width = mx.float32, 1  # type: ignore[attr-defined]


def main(folder: Path) -> None:
    disk, cache = open_caches(folder)
    rng, stored = np.random.default_rng(0), sum(node.record is not None for node in cache._nodes())
    while stored < BLOCKS:
        tokens = rng.integers(0, 150_000, 20 * BLOCK)
        cache.store(tokens, filled(make_cache, tokens))
        disk.flush()
        stored += 20
    disk.close()
    for _ in range(3):
        start, busy = time.perf_counter(), time.process_time()
        disk, cache = open_caches(folder)
        took, busy = time.perf_counter() - start, time.process_time() - busy
        print(f"{took:.2f} s, {busy:.2f} s of a core: {sum(1 for _ in cache._nodes())} blocks, {disk.nbytes >> 20} MB")
        disk.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
