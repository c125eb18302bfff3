"""The models that a benchmark runs: a pair by its name, or folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_specprefill import ModelPair, load_pair
from mlx_specprefill_server.pairs import Pair, find_pair

__all__ = ["add_options", "load", "loaded"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", default="demo", help="a name in models/pairs.toml, like demo or smollm2")
    parser.add_argument("--target", help="a folder, a GGUF file or a repository instead, with --draft")
    parser.add_argument("--draft", help="likewise; self: the target's own layers")


def loaded(options: argparse.Namespace, dtype: str = "auto") -> ModelPair:
    """The pair that was asked for.

    Raises:
        LoadError, PairsError: it can't be found or read.
    """
    if options.target is not None:
        return load_pair(options.target, options.draft, dtype=dtype)
    return load(find_pair(options.pair), dtype)


def load(pair: Pair, dtype: str = "auto") -> ModelPair:
    """The models of a row of pairs.toml, with all that the row says of its draft."""
    heads = None if pair.heads is None else Path(pair.heads)
    return load_pair(
        pair.target,
        pair.draft,
        dtype=dtype,
        draft_layers=pair.draft_layers,
        draft_heads=pair.draft_heads,
        heads=heads,
    )
