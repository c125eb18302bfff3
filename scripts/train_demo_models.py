"""Train the demonstration models of `models/demo` and export them.

    python scripts/train_demo_models.py tokenizer
    python scripts/train_demo_models.py train draft      # resumes from its last checkpoint
    python scripts/train_demo_models.py train target
    python scripts/train_demo_models.py export           # writes models/demo/{draft,target}

Needs the `train` extra. One thread per process is the default: train draft and target side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from training import config, export, stages
from training import tokenizer as chat

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(arguments)
    pair = config.load(SCRIPTS / "training" / "configs" / f"{options.family}.toml")
    runs = options.runs / options.family
    if options.command == "tokenizer":
        _train_tokenizer(pair.tokenizer, runs)
    elif options.command == "train":
        _keep_freed_memory()
        torch.set_num_threads(options.threads)
        stages.train(pair.runs[options.role], _tokenizer(runs), runs / options.role, _device(options.device))
    else:
        for role, run in pair.runs.items():
            model, progress = stages.load_weights(runs / role, run)
            export.export(model, _tokenizer(runs), options.out / role)
            print(
                f"{role}: step {progress.step}, answer loss {progress.loss:.3f}, written to {options.out.name}/{role}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="plain", help="name of a file in scripts/training/configs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tokenizer", help="train the shared tokenizer")
    train = commands.add_parser("train", help="train one model")
    train.add_argument("role", choices=config.ROLES)
    train.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    train.add_argument("--threads", type=int, default=1)
    out = commands.add_parser("export", help="write both models")
    out.add_argument("--out", type=Path, default=ROOT / "models" / "demo")
    return parser


def _train_tokenizer(settings: config.TokenizerConfig, runs: Path) -> None:
    runs.mkdir(parents=True, exist_ok=True)
    tokenizer = chat.train(settings.vocab_size, settings.seed, settings.samples)
    tokenizer.save(str(runs / "tokenizer.json"))
    print(f"tokenizer with {tokenizer.get_vocab_size()} entries")


def _tokenizer(runs: Path) -> Tokenizer:
    path = runs / "tokenizer.json"
    if not path.is_file():
        sys.exit("no tokenizer yet: run the `tokenizer` command first")
    return Tokenizer.from_file(str(path))


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks: returning them to the system after each step costs a third of the time."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 2**31 - 1)


if __name__ == "__main__":
    main()
