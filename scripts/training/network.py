"""A trainable network of any family: embedding, blocks, final norm, output tied to the embedding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import rms_norm

Rotation = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that networks of all families have; the names are those of the exported config.json."""

    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    intermediate_size: int
    head_dim: int = 32
    max_position_embeddings: int = 16384
    rms_norm_eps: float = 1e-6
    final_norm_gain: float = 1.5

    @property
    def attention_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    def config(self) -> dict[str, object]:
        """Return the entries of config.json that all families have."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")
        values = {name: getattr(self, name) for name in (*names, "max_position_embeddings")}
        return values | {"num_key_value_heads": self.num_attention_heads}


class Block(nn.Module, ABC):
    """One layer of a network."""

    @abstractmethod
    def forward(self, x: Tensor, rotation: Rotation, shape: tuple[int, int]) -> Tensor:
        """x: (N, d) -> (N, d); shape: (B, L)."""

    @abstractmethod
    def matrices(self) -> Sequence[nn.Parameter]:
        """The parameters that Muon trains: matrices or stacks of matrices."""


class Network(nn.Module):
    """Embedding, blocks, final norm and tied output."""

    def __init__(self, sizes: Sizes, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Parameter(torch.empty(sizes.vocab_size, sizes.hidden_size))
        self.blocks = nn.ModuleList(blocks)
        self.final_norm = nn.Parameter(torch.full((sizes.hidden_size,), sizes.final_norm_gain))

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of the attention layers, None where positions play no part."""
        return None

    def hidden(self, tokens: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """tokens, positions: (B, L) -> (N, d), before the final norm."""
        rotation = self.rotation(positions, dtype)
        x = F.embedding(tokens.flatten(), self.embedding).to(dtype)
        for block in self.blocks:
            x = block(x, rotation, (tokens.shape[0], tokens.shape[1]))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """(n, d) -> (n, V); called with the few rows that carry a loss."""
        y = rms_norm(hidden, self.final_norm, self.sizes.rms_norm_eps)
        return F.linear(y, self.embedding.to(hidden.dtype))

    def matrices(self) -> list[nn.Parameter]:
        """The parameters of all blocks that Muon trains."""
        return [matrix for block in self.blocks for matrix in block.matrices()]
