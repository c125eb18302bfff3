"""The common part of all families' hand-built initial values: a retrieval circuit that training adapts.

A random start of this size does not learn to retrieve within the budget, so the first layers start as an n-gram
look-up. The stream is split: the first half of the coordinates (the *content*) holds the token, the second half is
divided into *slots* of `SLOT` coordinates; slot j is for the token j+1 back.

- Look-back: each family writes a projection of earlier tokens into the slots with what it has (positional attention
  heads, or the short convolutions of recurrent layers).
- Match and copy: heads of the first attention layer after that compare "token j back of here" with "token j+1 back of
  there" for a few j, so they attend to the token that followed the same words earlier, and copy its content.
- Pointing heads (the draft only): they attend to the tokens after each match rather than the next one, so that a few
  rows of the draft's answer light up the whole fact. They start without an output.
- Everything else starts with outputs near zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .network import Sizes

SLOT = 16
NOISE = 0.005
MEAN = 0.5  # length of the shared embedding component that constant queries and gates read
COPY = 1.5
LAGS = ((0, 1), (0, 1, 2), (1, 2), (0, 1, 2, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3, 4), (0,))


@dataclass(frozen=True)
class Start:
    """The options in which the starts of a draft and a target differ."""

    slots: int = 4
    pointing_heads: int = 0


@dataclass(frozen=True)
class Layout:
    """The division of the residual stream at the start."""

    hidden: int
    slots: int

    def __post_init__(self) -> None:
        if SLOT * self.slots > self.hidden // 2:
            raise ValueError("the slots do not fit in half of the residual stream")

    @property
    def content(self) -> int:
        return self.hidden // 2

    @property
    def mean(self) -> int:
        """The coordinate of the shared mean: the last one of the content."""
        return self.content - 1

    def slot(self, lag: int) -> slice:
        """Return the slice for the token `lag` back (1 or more)."""
        first = self.content + (lag - 1) * SLOT
        return slice(first, first + SLOT)


@dataclass(frozen=True)
class Heads:
    """The parts of an attention layer's parameters; query, key, value: (H, D, d), out: (d, H, D). Views: written to."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


def heads_of(sizes: Sizes, projections: Tensor, out: Tensor) -> Heads:
    """Return the parts of an attention layer, whose projections of the stream (3 or more, a, d) become small."""
    number, dim = sizes.num_attention_heads, sizes.head_dim
    projections.mul_(NOISE * sizes.hidden_size**0.5)
    query, key, value, *_ = projections.view(-1, number, dim, sizes.hidden_size)
    return Heads(query, key, value, out.view(-1, number, dim))


def look_back(
    query: Tensor,
    key: Tensor,
    heads: Heads,
    layout: Layout,
    projected: Tensor,
    shares: Sequence[float],
    theta: float,
    length: float,
    write: float,
) -> None:
    """Let head h attend to the token h + 1 back, by phases of constant queries and keys, and write it into its slot.

    Args:
        query, key: the constants of each head, (H, D).
        shares: of the RoPE pairs in a head, fastest first.
        theta: RoPE's base.
        length: of the constants.
        write: gain of a head's output.
    """
    number, dim = heads.query.shape[:2]
    used, half = len(shares), dim // 2
    amplitude = length * torch.tensor(shares).sqrt()
    angles = theta ** (-torch.arange(used) / half)
    for h in range(min(number, layout.slots)):
        query[h, :used] += amplitude * torch.cos(angles * (h + 1))
        query[h, half : half + used] -= amplitude * torch.sin(angles * (h + 1))
        key[h, :used] += amplitude
        heads.value[h, :SLOT, : layout.mean] += projected
        heads.out[layout.slot(h + 1), h, :SLOT] += write * torch.eye(SLOT)


def normal(shape: torch.Size | tuple[int, ...], std: float, generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * std


def orthogonal(size: int, generator: Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]


def projection(layout: Layout, generator: Generator) -> Tensor:
    """Return the projection (SLOT, content - 1) of a token into a slot."""
    return orthogonal(layout.mean, generator)[:SLOT]


def embed(embedding: Tensor, layout: Layout, generator: Generator) -> None:
    """Fill the embedding: random content of length about 1, one coordinate for the shared mean, little in the slots."""
    values = normal(embedding.shape, layout.content**-0.5, generator)
    values[:, layout.mean] = MEAN
    values[:, layout.content :] *= 0.25
    embedding.copy_(values)


def fill(inputs: list[Tensor], outputs: list[Tensor], generator: Generator) -> None:
    """Fill matrices that read the stream at random, and those that write to it near zero."""
    for matrix in inputs:
        matrix.copy_(normal(matrix.shape, matrix.shape[-1] ** -0.5, generator))
    for matrix in outputs:
        matrix.copy_(normal(matrix.shape, NOISE, generator))


def slow_rows(head_dim: int) -> Tensor:
    """Return the coordinates of a head that RoPE hardly turns, or not at all: the last SLOT/2 pairs."""
    slow = torch.arange(head_dim // 2 - SLOT // 2, head_dim // 2)
    return torch.cat((slow, slow + head_dim // 2))


def match_and_copy(
    heads: Heads, layout: Layout, projected: Tensor, pointing: int, gain: float, copy: float, generator: Generator
) -> None:
    """Let head h attend to earlier occurrences of the tokens at `LAGS[h]` and copy a share of the content there.

    The comparison lives in coordinates that RoPE hardly turns over the distances of a document. The last `pointing`
    heads attend to any of the tokens that follow an earlier occurrence of the current one.

    Args:
        gain: factor on queries and keys, for layers that do not normalise them.
        copy: factor on what is copied.
    """
    number, dim = heads.query.shape[:2]
    copying, content, rows = number - pointing, layout.content, slow_rows(dim)
    query, key = torch.zeros_like(heads.query), torch.zeros_like(heads.key)
    current = math.sqrt(content / SLOT) * projected
    for h in range(copying):
        for lag in (lag for lag in LAGS[h % len(LAGS)] if lag < layout.slots):
            mixing = orthogonal(SLOT, generator)
            if lag == 0:
                query[h, rows, : layout.mean] += mixing @ current
            else:
                query[h, rows, layout.slot(lag)] += mixing
            key[h, rows, layout.slot(lag + 1)] += mixing
        copied = torch.arange(content)[h * content // copying : (h + 1) * content // copying]
        heads.value[h, torch.arange(len(copied)), copied] += 1.0
        heads.out[copied, h, torch.arange(len(copied))] += copy
    for h in range(copying, number):
        query[h, rows, : layout.mean] += current
        key[h, rows, content : content + layout.slots * SLOT] += torch.eye(SLOT).repeat(1, layout.slots)
    heads.query.add_(gain * query)
    heads.key.add_(gain * key)
    heads.value[:, :, layout.mean] = 0.0  # the shared mean carries no token
