"""Fits the map that estimates what a pair's target does not read, and writes it to a file.

The map of `smollm2`: scripts/fit_estimates.py smollm2 models/smollm2/estimates.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from mlx_specprefill import EstimateFit
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import find_pair


def main(pair: str, file: Path, tokens: int = 24_000, rank: int = 256) -> None:
    """Fit the map of a named pair.

    Args:
        tokens: to fit on.
        rank: numbers of a token's code.
    """
    found = None
    steps = EstimateFit(load(find_pair(pair), "auto"), tokens, rank).steps()
    try:
        while True:
            progress = next(steps)
            print(f"\r{progress.done} of {progress.total} tokens", end="", file=sys.stderr)
    except StopIteration as done:
        found = done.value
    if found is None:
        raise SystemExit("estimates bring a sparse reading of this pair no nearer to full reading: nothing is written")
    found.write(file)
    print(f"\n{file}: {file.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
