"""A process that fills a prefix cache on disk until it is killed: `disk_writer.py FOLDER SEED`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# Fifty of these are started in one test. The two packages import transformers, which takes seconds; the cache needs
# nothing of that, so their submodules are imported without them.
for package in ("mlx_specprefill", "mlx_lm") if __name__ == "__main__" else ():
    spec = find_spec(package)
    sys.modules[package] = ModuleType(package)
    sys.modules[package].__path__ = list(spec.submodule_search_locations or ())

from mlx_specprefill.cache.budget import ByteBudget  # noqa: E402
from mlx_specprefill.cache.prefix.disk import DiskTier  # noqa: E402
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache  # noqa: E402
from tests.cache.prefix.stores import BLOCK, fake_caches, filled, prompt_of  # noqa: E402

# More than what it writes before it dies, less than what all of its like write: eviction runs, too.
FILE_BYTES = 3_000_000
MAKE = fake_caches(stateful=True, window=6, width=512)


def main(folder: str, seed: int) -> None:
    disk = DiskTier(Path(folder), FILE_BYTES)
    prefixes = StoredPrefixCache(disk, False, "model", MAKE, ByteBudget(1_000_000), block_size=BLOCK)
    print("ready", len(prefixes.entries()), flush=True)
    while True:
        seed += 1
        prompt = prompt_of(seed % 40)
        hit = prefixes.lookup(prompt)
        if hit is None or hit.length < len(prompt):
            prefixes.store(prompt, filled(MAKE, prompt))
        if seed % 16 == 0:
            disk.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
