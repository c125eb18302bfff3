"""The training loop: a curriculum of (length, batch, steps) stages with checkpoints that resume exactly."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from . import optim
from .batches import ANSWER, CONTEXT, Batch, DataConfig, make_batch
from .export import read
from .network import Network, Sizes


@dataclass(frozen=True)
class Stage:
    """`steps` optimiser steps on batches of `batch` samples of `length` tokens.

    `wholes` more samples per step, of `whole_length` tokens, have to be read as a whole: they have one answer each, so
    that long ones would teach little per token.
    """

    length: int
    batch: int
    steps: int
    wholes: int = 0
    whole_length: int = 256

    def batches(self, seed: str, data: DataConfig, tokenizer: Tokenizer) -> list[Batch]:
        """Return the batches of one step."""
        made = [make_batch(seed, self.length, self.batch, data, tokenizer)]
        if self.wholes:
            alone = replace(data, copy_share=0.0, mixture=replace(data.mixture, whole=1.0, greeting=0.0))
            made.append(make_batch(f"{seed}/wholes", self.whole_length, self.wholes, alone, tokenizer))
        return made


@dataclass(frozen=True)
class RunConfig:
    """The options that determine one training run."""

    family: ModuleType
    sizes: Sizes
    start: Any
    data: DataConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    muon_lr: float = 0.006
    adam_lr: float = 0.001
    warmup: int = 20
    final_rate: float = 0.03
    context_weight: float = 0.04
    micro_tokens: int = 2048  # tokens per forward pass: small enough for the activations to stay in the cache

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        """Return the stage of a step."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError("step is beyond the last stage")

    def rate_at(self, step: int) -> float:
        """Return the factor of the base rates: warm-up, then linear decay."""
        left = 1.0 - step / self.steps
        return min(1.0, (step + 1) / self.warmup) * (self.final_rate + (1.0 - self.final_rate) * left)


@dataclass
class Progress:
    """The progress of a run, saved with the checkpoint and quoted in the model card."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    accuracy: float = 0.0  # share of answers with every token right, given the right tokens before it
    history: list[dict[str, float]] = field(default_factory=list)

    def record(self, loss: float, accuracy: float, tokens: int, seconds: float) -> None:
        """Update the running means with one step."""
        keep = min(0.95, self.step / (self.step + 1))
        self.loss = keep * self.loss + (1 - keep) * loss
        self.accuracy = keep * self.accuracy + (1 - keep) * accuracy
        self.step, self.tokens, self.seconds = self.step + 1, self.tokens + tokens, self.seconds + seconds


def train(
    config: RunConfig,
    tokenizer: Tokenizer,
    folder: Path,
    device: torch.device,
    exported: Path | None = None,
    save_every: int = 50,
) -> Network:
    """Run all stages, or the rest of them after the checkpoint in `folder`.

    Args:
        exported: go on from the weights in this folder instead of the structured start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = config.family.Network(config.sizes)
    config.family.initialise(model, config.start, config.seed)
    if exported is not None:
        read(model, exported)
    model.to(device)
    optimisers = optim.build(model, config.muon_lr, config.adam_lr)
    progress = _resume(folder, model, optimisers)
    bar = tqdm(total=config.steps, initial=progress.step, desc=folder.name, mininterval=10, dynamic_ncols=True)
    while progress.step < config.steps:
        _advance(config, model, optimisers, tokenizer, progress, device)
        bar.update()
        bar.set_postfix(_summary(config, progress))
        if progress.step % save_every == 0 or progress.step == config.steps:
            progress.history.append(_summary(config, progress))
            _save(folder, model, optimisers, progress)
    bar.close()
    return model


def load_weights(folder: Path, config: RunConfig) -> tuple[Network, Progress]:
    """Load the model and the record of the last checkpoint in `folder`."""
    model = config.family.Network(config.sizes)
    progress = _resume(folder, model, [])
    if not progress.step:
        raise FileNotFoundError(f"no checkpoint in {folder}")
    return model, progress


def _advance(
    config: RunConfig,
    model: Network,
    optimisers: list[torch.optim.Optimizer],
    tokenizer: Tokenizer,
    progress: Progress,
    device: torch.device,
) -> None:
    started = time.perf_counter()
    stage = config.stage_at(progress.step)
    optim.set_rate(optimisers, config.rate_at(progress.step))
    made = stage.batches(f"{config.seed}/{progress.step}", config.data, tokenizer)
    results = [backward(model, batch, config, device) for batch in made]
    loss, accuracy = (sum(values) / len(made) for values in zip(*results, strict=True))
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()
    progress.record(loss, accuracy, sum(batch.tokens.numel() for batch in made), time.perf_counter() - started)


def backward(model: Network, batch: Batch, config: RunConfig, device: torch.device) -> tuple[float, float]:
    """Accumulate the gradients of one batch; returns the answer loss and the share of fully right answers."""
    answers = int((batch.kinds == ANSWER).sum())
    context = int((batch.kinds == CONTEXT).sum())
    rows = max(1, config.micro_tokens // batch.tokens.shape[1])
    total = 0.0
    right: dict[int, bool] = {}
    for start in range(0, batch.tokens.shape[0], rows):
        part = slice(start, start + rows)
        hidden = model.hidden(batch.tokens[part].to(device), batch.positions[part].to(device), torch.bfloat16)
        kinds = batch.kinds[part].flatten()
        chosen = kinds.nonzero()[:, 0]
        logits = model.logits(hidden[chosen.to(device)]).float()
        labels = batch.labels[part].flatten()[chosen]
        is_answer = kinds[chosen] == ANSWER
        losses = F.cross_entropy(logits, labels.to(device), reduction="none")
        weights = torch.where(is_answer, 1 / max(answers, 1), config.context_weight / max(context, 1)).to(device)
        (losses * weights).sum().backward()
        total += float(losses.detach()[is_answer.to(device)].sum())
        _count_right(right, logits, labels, batch.turns[part].flatten()[chosen])
    return total / max(answers, 1), sum(right.values()) / max(len(right), 1)


def _count_right(right: dict[int, bool], logits: Tensor, labels: Tensor, turns: Tensor) -> None:
    hits = (logits.detach().argmax(-1).cpu() == labels).tolist()
    for turn, hit in zip(turns.tolist(), hits, strict=True):
        if turn:
            right[turn] = right.get(turn, True) and hit


def _summary(config: RunConfig, progress: Progress) -> dict[str, float]:
    length = config.stage_at(min(progress.step, config.steps) - 1).length
    return {
        "step": progress.step,
        "length": length,
        "loss": round(progress.loss, 3),
        "right": round(progress.accuracy, 3),
        "Mtok": round(progress.tokens / 1e6, 2),
        "min": round(progress.seconds / 60, 1),
    }


def _save(folder: Path, model: Network, optimisers: list[torch.optim.Optimizer], progress: Progress) -> None:
    state = {"model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers]}
    partial = folder / "checkpoint.partial"
    torch.save(state | {"progress": asdict(progress)}, partial)
    partial.replace(folder / "checkpoint.pt")  # an interruption leaves the previous checkpoint whole
    (folder / "progress.json").write_text(json.dumps(asdict(progress), indent=1) + "\n", encoding="utf-8")


def _resume(folder: Path, model: Network, optimisers: list[torch.optim.Optimizer]) -> Progress:
    path = folder / "checkpoint.pt"
    if not path.is_file():
        return Progress()
    state = torch.load(path, map_location=model.embedding.device, weights_only=True)
    model.load_state_dict(state["model"])
    for optimiser, values in zip(optimisers, state["optimisers"], strict=False):
        optimiser.load_state_dict(values)
    return Progress(**state["progress"])
