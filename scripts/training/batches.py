"""Batches from synthetic chats: tokens, positions, and the rows that carry a loss."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from . import tasks
from . import tokenizer as chat

IGNORE, ANSWER, CONTEXT = 0, 1, 2


@dataclass(frozen=True)
class DataConfig:
    """Shares and lengths of the training samples."""

    mixture: tasks.Mixture
    copy_share: float = 0.06  # random-token copy drills; more of them drowns the gradient
    context_share: float = 1 / 12
    pose_share: float = 0.7
    pose_jumps: int = 32
    pose_span: int = 12_000


@dataclass(frozen=True)
class Batch:
    """tokens, labels, positions, kinds, turns: (B, L); `turns` numbers the answers from 1, 0 elsewhere."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    kinds: Tensor
    turns: Tensor


Row = tuple[list[int], list[int], list[int]]


def make_batch(seed: str, length: int, size: int, config: DataConfig, tokenizer: Tokenizer) -> Batch:
    """Return a batch that depends on its arguments only, so that an interrupted run continues with the same data."""
    rng = random.Random(seed)
    rows = [_row(rng, length, config, tokenizer) for _ in range(size)]
    ids, kinds, turns = (torch.tensor([row[part] for row in rows]) for part in range(3))
    answers = int(turns.max())
    turns = torch.where(turns > 0, turns + answers * torch.arange(size)[:, None], 0)
    positions = torch.tensor([_positions(rng, length, config) for _ in range(size)])
    return Batch(ids[:, :-1], ids[:, 1:], positions, kinds[:, 1:], turns[:, 1:])


def _row(rng: random.Random, length: int, config: DataConfig, tokenizer: Tokenizer) -> Row:
    """Return length + 1 ids, each with its kind as a label and the turn it belongs to."""
    if rng.random() < config.copy_share:
        ids, kinds, turns = _copy_drill(rng, length + 1, tokenizer.get_vocab_size())
    else:
        ids, kinds, turns = _chat(rng, length + 1, config, tokenizer)
    padding = length + 1 - len(ids)
    kinds = [
        CONTEXT if kind == IGNORE and index and rng.random() < config.context_share else kind
        for index, kind in enumerate(kinds)
    ]
    return ids + [0] * padding, kinds + [IGNORE] * padding, turns + [0] * padding


def _chat(rng: random.Random, length: int, config: DataConfig, tokenizer: Tokenizer) -> Row:
    sample = tasks.training_sample(rng, length, config.mixture, lambda text: len(tokenizer.encode(text).ids))
    ids: list[int] = []
    kinds: list[int] = []
    turns: list[int] = []
    turn = 0
    for text, trained in chat.render(sample.messages()):
        part = tokenizer.encode(text).ids
        turn += trained
        ids += part
        kinds += [ANSWER if trained else IGNORE] * len(part)
        turns += [turn if trained else 0] * len(part)
    return ids[:length], kinds[:length], turns[:length]


def _copy_drill(rng: random.Random, length: int, vocabulary: int) -> Row:
    """Return random tokens and their repetition. Only the repetition carries a loss, and it is no answer."""
    period = rng.randrange(8, min(length // 2, 200))
    passage = [rng.randrange(3, vocabulary) for _ in range(period)]
    gap = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(length - 2 * period + 1))]
    ids = passage + gap + passage
    start = len(ids) - period + 2  # two tokens of the passage identify the place
    return ids, [IGNORE] * start + [ANSWER] * (len(ids) - start), [0] * len(ids)


def _positions(rng: random.Random, length: int, config: DataConfig) -> list[int]:
    """Return increasing positions, mostly with random jumps, as after a sparse prefill of a long prompt."""
    if rng.random() >= config.pose_share or length >= config.pose_span:
        return list(range(length))
    extra = rng.randrange(config.pose_span - length)
    jumps = rng.randint(1, config.pose_jumps)
    cuts = sorted(rng.randrange(extra + 1) for _ in range(jumps))
    places = sorted(rng.randrange(length) for _ in range(jumps))
    positions, shift, following = [], 0, 0
    for index in range(length):
        while following < jumps and places[following] == index:
            shift = cuts[following]
            following += 1
        positions.append(index + shift)
    return positions
