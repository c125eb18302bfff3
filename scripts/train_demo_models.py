"""Train the demonstration pairs, one per architecture family, and export them.

    python scripts/train_demo_models.py tokenizer                # shared by all families
    python scripts/train_demo_models.py train qwen3_5 draft      # resumes from its last checkpoint
    python scripts/train_demo_models.py train qwen3_5 target
    python scripts/train_demo_models.py export qwen3_5           # writes models/demo-qwen3_5/{draft,target}
    python scripts/train_demo_models.py verify                   # arithmetic of all families against mlx-lm

Families are the files in scripts/training/configs. Needs the `train` extra. One thread per process is the default:
train draft and target side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from training import config, export, stages, verify
from training import tokenizer as chat

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
CONFIGS = ROOT / "scripts" / "training" / "configs"
FAMILIES = sorted(path.stem for path in CONFIGS.glob("*.toml"))


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(arguments)
    if options.command == "tokenizer":
        _train_tokenizer(options.tokenizer)
    elif options.command == "verify":
        _verify(_tokenizer(options.tokenizer))
    elif options.command == "average":
        export.average(options.folder, options.other, options.share)
    elif options.command == "train":
        _keep_freed_memory()
        torch.set_num_threads(options.threads)
        run = _config(options.family).runs[options.role]
        folder = options.runs / options.family / options.role
        stages.train(run, _tokenizer(options.tokenizer), folder, _device(options.device), options.exported)
    else:
        _export(options.family, options.runs, _tokenizer(options.tokenizer), options.out or _folder(options.family))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of checkpoints")
    parser.add_argument("--tokenizer", type=Path, default=MODELS / "demo" / "target" / "tokenizer.json")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tokenizer", help="train the shared tokenizer and write it to --tokenizer")
    train = commands.add_parser("train", help="train one model")
    train.add_argument("family", choices=FAMILIES)
    train.add_argument("role", choices=config.ROLES)
    train.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    train.add_argument("--exported", type=Path, help="go on from the weights in this folder (qwen3 type only)")
    train.add_argument("--threads", type=int, default=1)
    out = commands.add_parser("export", help="write both models of a family and check them against mlx-lm")
    out.add_argument("family", choices=FAMILIES)
    out.add_argument("--out", type=Path, help="a folder; that of the bundled pair if not given")
    mix = commands.add_parser("average", help="move exported weights towards those they were trained from")
    mix.add_argument("folder", type=Path)
    mix.add_argument("other", type=Path)
    mix.add_argument("--share", type=float, required=True, help="0: nothing changes, 1: all of the other's")
    commands.add_parser("verify", help="check parity with mlx-lm on the untrained networks")
    return parser


def _config(family: str) -> config.PairConfig:
    return config.load(CONFIGS / f"{family}.toml")


def _folder(family: str) -> Path:
    return MODELS / ("demo" if family.startswith("plain") else f"demo-{family}")


def _train_tokenizer(path: Path) -> None:
    settings = _config(FAMILIES[0]).tokenizer
    tokenizer = chat.train(settings.vocab_size, settings.seed, settings.samples)
    tokenizer.save(str(path))
    print(f"tokenizer with {tokenizer.get_vocab_size()} entries")


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        sys.exit(f"no tokenizer at {path}: run the `tokenizer` command first")
    return Tokenizer.from_file(str(path))


def _export(family: str, runs: Path, tokenizer: Tokenizer, folder: Path) -> None:
    for role, run in _config(family).runs.items():
        model, progress = stages.load_weights(runs / family / role, run)
        export.export(model, tokenizer, folder / role)
        print(f"{role}: step {progress.step}, answer loss {progress.loss:.3f}, written to {folder.name}/{role}")
        _report(f"{family} {role}", verify.parity(verify.rounded(model), folder / role))


def _verify(tokenizer: Tokenizer) -> None:
    for family in FAMILIES:
        for role, run in _config(family).runs.items():
            model = verify.rounded(verify.disturbed(run.family.Network(run.sizes), run))
            with tempfile.TemporaryDirectory() as folder:
                export.export(model, tokenizer, Path(folder))
                _report(f"{family} {role}", verify.parity(model, Path(folder)))


def _report(name: str, difference: float) -> None:
    """Print a difference; end the program if it is more than rounding."""
    if not verify.close(difference):
        sys.exit(f"{name}: largest difference {difference:.1e}, more than {verify.TOLERANCE:.0e}")
    print(f"{name}: largest difference {difference:.1e}")


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


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
