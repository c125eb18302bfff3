"""The trained layer: RMS norm, a query and a key projection, heads without values or positions.

A row of a head is softmax(q_i k_j / sqrt(width)) over what token i sees. The first token is a sink, as in the target:
a token that asks for nothing looks there, and so counts for nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

FLOOR = 0.01  # of the median variance: directions that are smaller stay so


class Whitening:
    """RMS norm and a linear map that give hidden states mean 0 and equal variance in all directions.

    A few directions of a residual stream are hundreds of times larger than the rest and say little. Heads are trained
    on whitened states and the map is put into their weights afterwards.
    """

    def __init__(self, states: Sequence[torch.Tensor], eps: float) -> None:
        self.eps = eps
        normed = torch.cat([self._norm(state.float()[1:]) for state in states])  # the first token is like no other
        self.mean = normed.mean(0)
        values, vectors = torch.linalg.eigh((normed - self.mean).T @ (normed - self.mean) / len(normed))
        self.map = vectors @ torch.diag((values + FLOOR * values.median()).rsqrt()) @ vectors.T

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        return (self._norm(state.float()) - self.mean) @ self.map

    def _norm(self, state: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(state, state.shape[-1:], eps=self.eps)


class Heads(nn.Module):
    """Heads that map whitened hidden states (N, D) to logits (heads, rows, N)."""

    def __init__(self, hidden: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        alike = torch.randn(heads * width, hidden) / hidden**0.5  # at first a token looks for its like
        self.query, self.key = nn.Parameter(alike), nn.Parameter(alike.clone())
        self.bias = nn.Parameter(torch.zeros(heads * width))

    def forward(self, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        q, k = F.linear(states[rows], self.query, self.bias), F.linear(states, self.key)
        q, k = (x.unflatten(-1, (self.heads, self.width)).transpose(0, 1) for x in (q, k))
        return q @ k.transpose(-1, -2) / self.width**0.5

    def folded(self, whitening: Whitening) -> dict[str, torch.Tensor]:
        """Return weights for states that were only normed, by their names in MLX. Keys need no bias: softmax cancels
        it.
        """
        query, key = self.query.data @ whitening.map, self.key.data @ whitening.map
        bias = self.bias.data - query @ whitening.mean
        return {"q_proj.weight": query, "q_proj.bias": bias, "k_proj.weight": key}


@dataclass(frozen=True)
class Prompt:
    """The record of one layout by `collect.record`, with the hidden states after the requested layers."""

    states: torch.Tensor
    groups: torch.Tensor
    asked: torch.Tensor
    gold: torch.Tensor
    content: int
    sink: torch.Tensor | None = None
    mass: torch.Tensor | None = None
    place: torch.Tensor | None = None


def load(file: Path, layers: int) -> Prompt:
    held = torch.load(file, weights_only=True)
    if f"hidden{layers}" not in held:
        stored = sorted(int(name.removeprefix("hidden")) for name in held if name.startswith("hidden"))
        raise SystemExit(f"--layers {layers}: {file} has the hidden states after {stored} layers")
    named = {name: held.get(name) for name in ("groups", "asked", "gold", "sink", "mass", "place")}
    return Prompt(held[f"hidden{layers}"], content=int(held["content"]), **named)


def train(
    model: Heads,
    prompts: Sequence[Prompt],
    *,
    steps: int,
    told: Callable[[int, float, float], None],
    rate: float = 1e-3,
    found: float = 1.0,
    rows: int = 128,
    seed: int = 0,
) -> None:
    """Train by Adam with a cosine schedule, one prompt per step.

    Args:
        found: weight of the share of attention that a question's tokens give to its answer, beside the teacher's rows.
        rows: of the document that a step looks at, beside those of the questions.
        told: called with (step, teacher's loss, loss of the answer).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    scales = _scales(prompts)
    for step, prompt in zip(range(steps), _shuffled(prompts, seed), strict=False):
        teacher, answer = _losses(model, prompt, scales, rows)
        optimizer.zero_grad()
        (teacher + found * answer).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        told(step, teacher.item(), answer.item())


def _shuffled(prompts: Sequence[Prompt], seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(prompts, len(prompts))


def _scales(prompts: Sequence[Prompt]) -> torch.Tensor:
    """Return factors that make each teacher's mass outside the sink half of all, on average.

    Some teachers give the sink nearly everything.
    """
    taught = [prompt for prompt in prompts if prompt.mass is not None]
    if not taught:
        return torch.empty(0)
    sink = torch.stack([prompt.sink.float().mean(1) for prompt in taught]).mean(0)
    mass = torch.stack([prompt.mass.float().sum(-1).mean(1) for prompt in taught]).mean(0)
    return sink / mass


def _losses(model: Heads, prompt: Prompt, scales: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.nonzero(prompt.asked).flatten()
    if prompt.mass is not None:
        mass = prompt.mass.float() * scales[:, None, None]
        total = mass.sum(-1) + prompt.sink.float()
        document = torch.nonzero(prompt.groups == 0).flatten()[1:]
        weight = (mass.sum(-1) / total).mean(0)[document] + 0.05
        chosen = torch.cat([document[torch.multinomial(weight, min(rows, len(document)))], chosen])
    logits = model(prompt.states, chosen)
    order, groups = torch.arange(len(prompt.groups)), prompt.groups
    seen = (order <= chosen[:, None]) & ((groups == 0) | (groups == groups[chosen][:, None]))
    logs = logits.masked_fill(~seen, -1e9).log_softmax(-1)
    answer = _answer_loss(logs, prompt, chosen)
    if prompt.mass is None:
        return logs.new_zeros(()), answer
    heads = min(len(mass), model.heads)  # each learns from one teacher
    near = logs[:heads].gather(-1, prompt.place[:heads, chosen].long())
    loss = (mass[:heads, chosen] * near).sum(-1) + prompt.sink[:heads, chosen].float() * logs[:heads, :, 0]
    return -(loss / total[:heads, chosen]).mean(), answer


def _answer_loss(logs: torch.Tensor, prompt: Prompt, chosen: torch.Tensor) -> torch.Tensor:
    """Return -log of the share of the questions' attention to the document that falls on the answers."""
    losses, length = [], prompt.gold.shape[1]
    for number, gold in enumerate(prompt.gold):
        mine = (prompt.groups[chosen] == number + 1) & prompt.asked[chosen]
        attention = logs[:, mine, prompt.content : length].exp().sum(1)
        share = attention[:, gold[prompt.content :]].sum(-1) / (attention.sum(-1) + 1e-9)
        losses.append(-0.5 * (share.mean() + 1e-4).log() - 0.5 * (share + 1e-4).log().mean())
    return torch.stack(losses).mean() if losses else logs.new_zeros(())
