"""Train retrieval heads: a small attention layer on a target's first layers that finds the answer to a question.

    python scripts/train_retrieval_heads.py collect --target FOLDER_OR_GGUF     # hidden states and teachers' attention
    python scripts/train_retrieval_heads.py train --target FOLDER_OR_GGUF --layers 7 --file heads.safetensors

For targets of the llama type whose projections have no biases, with a chat template. Needs the `train` extra, of which
the documents come too. `collect` goes on where it was stopped, prompt by prompt. The heads learn two things: where the
target's own retrieval heads look (`--teachers`, in some of the prompts; of another target `mlx-specprefill calibrate`
finds them), and to give the attention of a question's tokens to the answer, whose place in the document is known.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from mlx.core import array as mx_array
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from retrieval import student
from retrieval.collect import Target, lay_out, record
from retrieval.text import make_document
from retrieval.written import write_heads

from mlx_specprefill import ModelPair, load_pair
from mlx_specprefill.selection.retrieval_heads import RetrievalHeads

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (5, 6, 7, 8)
TEACHERS = ("14.3", "17.3", "17.4", "17.5", "18.6", "18.7", "18.8", "20.3")  # layer.head of SmolLM2-135M
TAUGHT, LAST_TAUGHT = 3, 126  # every third prompt of the first ones has teachers' rows: they cost most of the time
LENGTHS = (1500, 2500, 3300, 3300, 3300, 4500)  # characters of a document
WIDTH = 64
PRINTED = 50  # steps
WHITENED = 60  # prompts from which the whitening is computed


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    pair = load_pair(options.target, dtype="float32")
    if options.command == "collect":
        _collect(pair, options)
    else:
        _train(pair, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect", help="store what the target makes of prompts: 5 MB each")
    collect.add_argument("--prompts", type=int, default=126)
    collect.add_argument("--layers", type=int, nargs="+", default=DEPTHS, help="after which hidden states are stored")
    collect.add_argument("--teachers", type=_head, nargs="+", default=list(map(_head, TEACHERS)), help="layer.head")
    collect.add_argument("--part", type=int, default=0, help="of --parts, for several processes side by side")
    collect.add_argument("--parts", type=int, default=1)
    train = commands.add_parser("train", help="train the heads and write their file")
    train.add_argument("--layers", type=int, default=7, help="of the target below the heads: one that was collected")
    train.add_argument("--heads", type=int, default=8)
    train.add_argument("--steps", type=int, default=600, help="one prompt each")
    train.add_argument("--file", type=Path, required=True)
    train.add_argument("--about", type=json.loads, default={}, help="origin and licence, as a JSON object")
    for command in (collect, train):
        command.add_argument("--target", required=True, help="a folder, a GGUF file or a repository id")
        command.add_argument("--data", type=Path, default=ROOT / "runs" / "retrieval_heads")
        command.add_argument("--threads", type=int, default=1)
    return parser


def _head(text: str) -> tuple[int, int]:
    layer, head = map(int, text.split("."))
    return layer, head


def _collect(pair: ModelPair, options: argparse.Namespace) -> None:
    folder: Path = options.data
    dense = dequantize_model(pair.target).parameters()
    weights = {name: torch.from_numpy(np.array(value)) for name, value in tree_flatten(dense)}
    target, tokenizer = Target(pair.target_config, weights, torch.bfloat16), pair.tokenizer._tokenizer
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.part, options.prompts, options.parts):
        file, rng = folder / f"{number:04}.pt", random.Random(f"retrieval heads {number}")
        if file.exists():
            continue
        length, taught = rng.choice(LENGTHS), number % TAUGHT == 0 and number < LAST_TAUGHT
        layout = lay_out(make_document(rng, length, 8 if taught else 12), tokenizer)
        record(target, layout, options.layers, options.teachers if taught else (), file)
        print(f"{file.name}: {len(layout.tokens)} tokens, {len(layout.gold)} questions", flush=True)


def _train(pair: ModelPair, options: argparse.Namespace) -> None:
    eps = pair.target_config["rms_norm_eps"]
    torch.manual_seed(0)
    files = sorted(options.data.glob("*.pt"))
    if not files:
        raise SystemExit(f"--data: no prompts in {options.data}; run `collect` first")
    prompts = [student.load(file, options.layers) for file in files]
    whitening = student.Whitening([prompt.states[::3] for prompt in prompts[:WHITENED]], eps)
    prompts = [replace(prompt, states=whitening(prompt.states)) for prompt in prompts]
    model = student.Heads(prompts[0].states.shape[-1], options.heads, WIDTH)
    student.train(model, prompts, steps=options.steps, told=_Printed())
    made = RetrievalHeads(prompts[0].states.shape[-1], options.heads, WIDTH, eps)
    made.load_weights([(name, mx_array(value.numpy())) for name, value in model.folded(whitening).items()])
    options.file.parent.mkdir(parents=True, exist_ok=True)
    write_heads(options.file, made, pair.target, options.layers, options.about)


class _Printed:
    """A printer of the mean losses of each 50 steps. The teachers' loss counts prompts with their rows."""

    def __init__(self) -> None:
        self.losses: list[tuple[float, float]] = []

    def __call__(self, step: int, teacher: float, answer: float) -> None:
        self.losses.append((teacher, answer))
        if step % PRINTED == PRINTED - 1:
            answers = fmean(answer for _, answer in self.losses)
            teachers = [teacher for teacher, _ in self.losses if teacher > 0]
            shown = f"{fmean(teachers):.2f}" if teachers else "none"
            print(f"step {step + 1}: teachers {shown}, answers {answers:.2f}", flush=True)
            self.losses.clear()


if __name__ == "__main__":
    main()
