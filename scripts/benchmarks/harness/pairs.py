"""The models of a benchmark: a pair by name, or folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlx_specprefill import DtypeName, ModelPair
from mlx_specprefill_server.cli.common import choose
from mlx_specprefill_server.cli.loading import load
from mlx_specprefill_server.cli.options import PairOptions
from mlx_specprefill_server.settings.server import Settings

from . import BenchError

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo" / "target"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", default="demo", help="a name in models/pairs.toml, like demo or smollm2")
    parser.add_argument("--target", help="a folder, a GGUF file or a repository instead, with --draft")
    parser.add_argument(
        "--draft", help="folder or repository id of the draft; self: the target's own first layers, also of a pair"
    )


def loaded(options: argparse.Namespace, dtype: DtypeName = "auto", settings: Settings | None = None) -> ModelPair:
    """Return the requested pair, with its draft's options in pairs.toml.

    Raises:
        OptionError, LoadError, PairsError: it is not named fully, or can't be found or read.
    """
    return load(choose(_named(options)), dtype, settings)


def demo_tokenizer() -> TokenizerWrapper:
    """Return the demo pair's tokenizer, for models without one; it does not warn of long texts."""
    return load_tokenizer(DEMO, {"model_max_length": 1 << 30})


def defaults(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of `serve` that match the pair's sparse prefill in its row."""
    pair = choose(_named(options))
    said = {"--specprefill-threshold": pair.threshold, "--keep-pct": pair.keep_pct}
    return tuple(part for name, value in said.items() if value is not None for part in (name, str(value)))


def checkpoints(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the folders of the target and the draft, for servers that read nothing else.

    Raises:
        BenchError: one of them is no folder with a model.safetensors.
        OptionError, PairsError: as for `loaded`.
    """
    pair = choose(_named(options))
    for side, model in (("target", pair.target), ("draft", pair.draft)):
        if not Path(model or "", "model.safetensors").is_file():
            raise BenchError(f"the {side} {model} is no folder with a model.safetensors: choose another --{side}")
    return Path(pair.target), Path(pair.draft or "")


def _named(options: argparse.Namespace) -> PairOptions:
    pair = options.pair if options.target is None else None
    return PairOptions(pair=pair, target=options.target, draft=options.draft)
