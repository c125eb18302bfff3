"""The hand-built initial values: a retrieval circuit that training adapts.

A random start of this size does not learn to retrieve within the budget, so the first two layers start as an n-gram
look-up. The residual stream is split: the first half of the coordinates (the *content*) holds the token, the second
half is divided into one *slot* of `SLOT` coordinates per head.

- Layer 0: head h looks h+1 tokens back (by RoPE phase alone) and writes a projection of that token into slot h.
- Layer 1: a head compares "token j back of here" with "token j+1 back of there" for a few j, so it attends to the
  token that followed the same words earlier, and copies its content.
- Pointing heads (layer 1, the draft only): they attend to the four tokens after each match rather than the next one,
  so that a few rows of the draft's answer light up the whole fact. They start without an output.
- The other layers start with outputs near zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Block, Decoder

SLOT = 16
NOISE = 0.005
MEAN = 0.5  # length of the shared embedding component that the positional heads read
WRITE = 0.25  # gain of the layer-0 output; a written slot then has about the length of an embedding
COPY = 1.5
LAGS = ((0, 1), (0, 1, 2), (1, 2), (0, 1, 2, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3, 4), (0,))


@dataclass(frozen=True)
class StartConfig:
    """What differs between the starts of a draft and a target."""

    look_back_gain: float = 2.0  # query and key norm gain of layer 0: how sharp its attention is
    # Shares of the RoPE pairs in a positional head, fastest first: fast pairs separate neighbours, slow ones exclude
    # far tokens where the fast phases happen to agree.
    pair_shares: tuple[float, ...] = (0.3, 0.2, 0.15, 0.1, 0.08, 0.07, 0.05, 0.05)
    # Layer 0 keeps its queries and keys. Orthogonalised updates move them even where the loss hardly cares, and the
    # heads then leak to tokens at multiples of the fastest RoPE period: harmless for the text, noise for the scores.
    keep_look_back: bool = False
    pointing_heads: int = 0  # heads of layer 1 that point instead of copying


def initialise(model: Decoder, start: StartConfig, seed: int) -> None:
    """Fill every parameter of `model`; norms and the other gains keep the values they were made with."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if SLOT * config.num_attention_heads > config.hidden_size // 2:
        raise ValueError("the slots of the heads do not fit in half of the residual stream")
    content = config.hidden_size // 2
    projection = _orthogonal(content - 1, generator)[:SLOT]  # (SLOT, content - 1)
    with torch.no_grad():
        _embedding(model, content, generator)
        for block in model.blocks:
            _near_zero_output(block, generator)
        model.blocks[0].qk_gain.fill_(start.look_back_gain)
        _look_back(model.blocks[0], content, projection, start.pair_shares)
        _match_and_copy(model.blocks[1], content, projection, start.pointing_heads, generator)


def _normal(shape: torch.Size | tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * std


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


def _embedding(model: Decoder, content: int, generator: torch.Generator) -> None:
    """Random content of length about 1; coordinate content-1 is the shared mean; little in the slots."""
    vocabulary, hidden = model.embedding.shape
    values = _normal((vocabulary, hidden), content**-0.5, generator)
    values[:, content - 1] = MEAN
    values[:, content:] *= 0.25
    model.embedding.copy_(values)


def _near_zero_output(block: Block, generator: torch.Generator) -> None:
    hidden = block.config.hidden_size
    block.qkv.copy_(_normal(block.qkv.shape, hidden**-0.5, generator))
    block.gate_up.copy_(_normal(block.gate_up.shape, hidden**-0.5, generator))
    block.out.copy_(_normal(block.out.shape, NOISE, generator))
    block.down.copy_(_normal(block.down.shape, NOISE, generator))


def _pair_angles(block: Block) -> Tensor:
    pairs = block.config.head_dim // 2
    return block.config.rope_theta ** (-torch.arange(pairs) / pairs)


def _look_back(block: Block, content: int, projection: Tensor, pair_shares: tuple[float, ...]) -> None:
    """Head h attends to the token h+1 back and writes its projection into slot h."""
    heads, dim = block.config.num_attention_heads, block.config.head_dim
    used, half = len(pair_shares), dim // 2
    amplitude = torch.tensor(pair_shares).sqrt()
    angles = _pair_angles(block)[:used]
    block.qkv.mul_(NOISE * block.config.hidden_size**0.5)
    query, key, value = block.qkv.view(3, heads, dim, -1)
    out = block.out.view(-1, heads, dim)
    for h in range(heads):
        query[h, :used, content - 1] += amplitude * torch.cos(angles * (h + 1))
        query[h, half : half + used, content - 1] -= amplitude * torch.sin(angles * (h + 1))
        key[h, :used, content - 1] += amplitude
        value[h, :SLOT, : content - 1] += projection
        slot = content + h * SLOT
        out[slot : slot + SLOT, h, :SLOT] += WRITE * torch.eye(SLOT)


def _match_and_copy(block: Block, content: int, projection: Tensor, pointing: int, generator: torch.Generator) -> None:
    """Head h attends to where the tokens at `LAGS[h]` occurred before and copies a share of the content there.

    The comparison lives in the slowest RoPE pairs, which hardly turn over the distances of a document. The last
    `pointing` heads attend to any of the next `heads` tokens after an earlier occurrence of the current one.
    """
    heads, dim = block.config.num_attention_heads, block.config.head_dim
    copying = heads - pointing
    slow = torch.arange(dim // 2 - SLOT // 2, dim // 2)
    rows = torch.cat((slow, slow + dim // 2))
    block.qkv.mul_(NOISE * block.config.hidden_size**0.5)
    query, key, value = block.qkv.view(3, heads, dim, -1)
    out = block.out.view(-1, heads, dim)
    current = math.sqrt(content / SLOT) * projection
    for h in range(copying):
        for lag in (lag for lag in LAGS[h % len(LAGS)] if lag < heads):
            mixing = _orthogonal(SLOT, generator)
            if lag == 0:
                query[h, rows, : content - 1] += mixing @ current
            else:
                query[h, rows, content + (lag - 1) * SLOT : content + lag * SLOT] += mixing
            key[h, rows, content + lag * SLOT : content + (lag + 1) * SLOT] += mixing
        copied = torch.arange(content)[h * content // copying : (h + 1) * content // copying]
        value[h, torch.arange(len(copied)), copied] += 1.0
        out[copied, h, torch.arange(len(copied))] += COPY
    for h in range(copying, heads):
        query[h, rows, : content - 1] += current
        key[h, rows, content:] += torch.eye(SLOT).repeat(1, heads)
    value[:, :, content - 1] = 0.0  # the shared mean carries no token
